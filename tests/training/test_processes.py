"""Two processes train what one trains, leave one log and one set of files, and resume exactly."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

import gerund
from gerund.jobs.locks import hold
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from gerund.training.run_folder import newest_checkpoint
from gerund.training.shards import OPTIMIZER, WEIGHTS, Stored
from tests.tiny import save_tiny
from tests.training.conftest import sentences
from tests.training.outcomes import read_log
from tests.training.two_processes import (
    assert_equal_states,
    carry_out,
    one_step,
    state,
    watched,
    work,
    work_nodes,
    work_steps,
)

ROOT = Path(__file__).parents[2]
# Seconds; a quiet machine needs a fraction.
PATIENCE = 600
# Those of the recipes below without chance in them.
SAME = ("causal", "hybrid", "unimae", "rankgen", "gur")
# All weights, from scratch; an adapter with heads beside it.
SHARDED = ("causal", "unimae")
TEXTS = {"sources": ["a"], "batch_size": 4, "micro_batch_size": 1, "length": 24}
TEXTS_ALONE = {name: value for name, value in TEXTS.items() if name != "sources"}
PAIRS = {"files": ["pairs.jsonl"]}
T5 = {"num_layers": 2, "num_decoder_layers": 1, "dropout_rate": 0.0}


def start_two(target, folder):
    """Run ``target`` in two processes; return what each of them told."""
    # From a server that has imported everything once: two interpreters of their own would do it twice.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.two_processes"])
    port = free_port()
    started = [context.Process(target=target, args=(folder, rank, port)) for rank in range(2)]
    deadline = time.monotonic() + PATIENCE
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(timeout=max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()
    told = [(folder / f"told-{rank}.txt").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(told)
    return told


def run_two(folder, jobs):
    """Carry the jobs out in two processes; return what stopped each job in each of them."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    told = start_two(work, folder)
    # Only the first process shows its log.
    assert "step 1/" in told[0]
    assert "step" not in told[1]
    return list(zip(*(json.loads((folder / f"stopped-{rank}.json").read_text()) for rank in range(2)), strict=True))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def recipes(corpus, base, cache):
    """Return the recipes of this file by name, as plain data without an output."""
    common = {
        "data": {
            "folder": str(corpus),
            "cache": str(cache),
            "sources": [
                {"name": "a", "files": ["a.train.jsonl"], "validation": ["a.valid.jsonl"], "weight": 2},
                {"name": "b", "files": ["b.train.jsonl"]},
            ],
            "validation_tokens": 128,
        },
        # With Adam's usual epsilon a rounding error of a small gradient becomes a whole step.
        "optimizer": {"learning_rate": 0.01, "epsilon": 0.01, "max_grad_norm": 0.5},
        "steps": 4,
        "precision": "fp32",
        "log_steps": 1,
        "save_steps": 2,
        "eval_steps": 2,
    }
    llama = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    scratch = {"config": {"model_type": "llama", "max_position_embeddings": 64, "tie_word_embeddings": True, **llama}}
    adapter = {"base": str(base), "lora": {"rank": 4, "alpha": 8}}
    causal = {"kind": "causal", "length": 16, "batch_size": 8, "micro_batch_size": 2, "decay_length": 32}
    contrastive = {"kind": "contrastive", "batch_size": 4, "micro_batch_size": 1, "length": 24, "pairs": PAIRS}
    simcse = {"kind": "simcse", **TEXTS, "unit": "sentences"}
    end_token = {"attention": "causal", "pooling": "last", "append_eos": True}
    return {
        "causal": {
            **common,
            "model": scratch,
            "tokenizer": {"vocab_size": 320, "max_length": 64},
            "objectives": [causal],
            "schedule": {"name": "wsd", "warmup_steps": 1, "decay_steps": 2},
        },
        "hybrid": {
            **common,
            "model": {**adapter, "gradient_checkpointing": True},
            "objectives": [
                {"kind": "mntp", **TEXTS, "weight": [[0, 1], [3, 0]]},
                {"kind": "msg", **TEXTS, "longest": 8, "weight": [[0, 0.5], [3, 0]]},
                {**simcse, "dropout": 0.0, "weight": [[0, 0], [1, 1]]},
                {**causal, "decay_length": None, "weight": [[0, 1], [1, 0], [3, 1]]},
            ],
        },
        "unimae": {
            **common,
            "model": adapter,
            "encoder": end_token,
            "objectives": [
                {"kind": "unimae", **TEXTS, "weight": [[0, 1], [2, 0]]},
                {**contrastive, "hard_negatives": 2, "projection": 8, "weight": [[0, 0], [1, 1]]},
            ],
        },
        "rankgen": {
            **common,
            "model": adapter,
            "encoder": end_token,
            "objectives": [
                {"kind": "rankgen", "passages": ["passages.jsonl"], "continuation_length": 16, **TEXTS_ALONE}
            ],
        },
        "gur": {
            **common,
            "model": {"config": {"model_type": "t5", "d_model": 16, "d_kv": 8, "num_heads": 2, "d_ff": 32, **T5}},
            "tokenizer": {"vocab_size": 400, "max_length": 64},
            "objectives": [
                {
                    "kind": "gur",
                    "pairs": {**PAIRS, "query": "query", "positive": "positive"},
                    **TEXTS_ALONE,
                    "title_fraction": 0.5,
                }
            ],
        },
        "dropout": {
            **common,
            "model": {**adapter, "lora": {"rank": 4, "alpha": 8, "dropout": 0.1}, "gradient_checkpointing": True},
            "encoder": end_token,
            "objectives": [
                {"kind": "unimae", **TEXTS, "weight": [[0, 1], [3, 0.2]]},
                {**simcse, "dropout": 0.3, "weight": [[0, 0], [1, 1]]},
            ],
        },
    }


@pytest.fixture(scope="module")
def paired_corpus(corpus):
    rows = [
        {
            "query": sentences(f"q{i}", 1),
            "positive": sentences(f"p{i}", 1),
            "negatives": [sentences(f"n{i}", 2), "The"],
            "opening": sentences(f"o{i}", 3),
        }
        for i in range(12)
    ]
    (corpus / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    passages = [
        {"document": i // 6, "prefix": sentences(f"x{i}", 1), "continuation": sentences(f"c{i}", 1)}
        | ({"generated": [sentences(f"g{i}", 1)]} if i % 3 else {})
        for i in range(18)
    ]
    (corpus / "passages.jsonl").write_text("".join(json.dumps(row) + "\n" for row in passages), "utf-8")
    return corpus


@pytest.fixture(scope="module")
def compared(paired_corpus, base, tmp_path_factory):
    """Train every recipe in one process and in two; return the folder of both, and what stopped the two."""
    folder = tmp_path_factory.mktemp("processes")
    files = {}
    for name, content in recipes(paired_corpus, base, folder / "cache").items():
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump({**content, "output": "out"}), "utf-8")

    def job(name, output, *more, **options):
        return {"recipe": str(files[name]), "overrides": [f"output={folder / output}", *more], **options}

    jobs = [job(name, f"two-{name}") for name in (*SAME, "dropout")]
    jobs += [job("dropout", "two-broken", crash=2), job("dropout", "two-broken", resume=True)]
    jobs += [job("hybrid", "refused-mntp", "objectives.mntp.batch_size=3", "objectives.mntp.micro_batch_size=null")]
    jobs += [job("causal", "refused-causal", "objectives.causal.batch_size=6")]
    # By shards: two trainings to their end, one that one process goes on with, and one that one process began.
    shards = "sharding=fsdp2"
    jobs += [job(name, f"shards-{name}", shards) for name in SHARDED]
    jobs += [job("causal", "two-then-one", shards, crash=2)]
    began = job("causal", "one-then-two")
    carry_out(folder, "began", **began, crash=2)
    jobs += [job("causal", "one-then-two", shards, resume=True)]
    stopped = run_two(folder / "results", jobs)
    gradients = {}
    for name in SAME:
        gradients[name] = {}
        with watched(gradients[name]):
            train(load_recipe(files[name], [f"output={folder / f'one-{name}'}"]))
    train(load_recipe(files["causal"], [f"output={folder / 'two-then-one'}"]), resume=True)
    return folder, dict(zip([job["overrides"][0].rpartition("/")[2] for job in jobs], stopped, strict=True)), gradients


@pytest.mark.slow
class TestSameAsOneProcess:
    @pytest.mark.parametrize("name", SAME)
    def test_gradients_of_every_step(self, compared, name):
        folder, _, gradients = compared
        one, two = gradients[name], load_file(folder / "results" / f"gradients-{SAME.index(name)}.safetensors")
        steps = {key.split(".")[0] for key in two}
        assert steps == set("0123")
        # The same parameters have a gradient: the heads of an objective that rests have none, and stay as they are.
        assert two.keys() == one.keys()
        for key, expected in one.items():
            scale = max(gradients[name][other].abs().max().item() for other in one if other[0] == key[0])
            torch.testing.assert_close(two[key], expected, rtol=1e-4, atol=1e-5 * scale)

    @pytest.mark.parametrize("name", SAME)
    def test_weights(self, compared, name):
        folder = compared[0]
        one, two = (
            load_file(folder / f"{count}-{name}/checkpoints/checkpoint-4/trainable.safetensors")
            for count in ("one", "two")
        )
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=2e-6)

    @pytest.mark.parametrize("name", SAME)
    def test_log_has_each_line_once_and_says_the_same(self, compared, name):
        folder = compared[0]
        one, two = (read_log(folder / f"{count}-{name}") for count in ("one", "two"))
        steps = [1, 2, 3, 4] if name in ("rankgen", "gur") else [1, 2, 2, 3, 4, 4]  # pairs have no validation
        assert [row["step"] for row in two] == [row["step"] for row in one] == steps
        for mine, other in zip(two, one, strict=True):
            timing = {"tokens_per_second", "seconds", "peak_memory_mib"}
            assert mine.keys() == other.keys()
            for key in mine.keys() - timing:
                assert mine[key] == pytest.approx(other[key], rel=1e-4), (mine["step"], key)
        for count in ("one", "two"):
            report = json.loads((folder / f"{count}-{name}/model/training.json").read_text())
            assert report["tokens"] == one[-1]["tokens"]

    def test_the_objectives_of_the_log_take_turns(self, compared):
        """What the comparison would not see: an objective that never takes part in either."""
        rows = [row for row in read_log(compared[0] / "two-hybrid") if "loss" in row]
        seen = [{key.removeprefix("loss_") for key in row if key.startswith("loss_")} for row in rows]
        masked = {"mntp", "msg"}
        assert seen == [masked | {"causal"}, *[masked | {"simcse"}] * 2, {"simcse", "causal"}]


@pytest.mark.slow
class TestResume:
    def test_is_exact_in_two_processes(self, compared):
        folder, stopped, _ = compared
        assert stopped["two-broken"] == (None, None)  # the second time; what the first one left is compared
        assert_equal_states(folder / "two-dropout", folder / "two-broken")
        assert any("decoder" in name for name in state(folder / "two-dropout"))
        logs = [
            [{k: v for k, v in row.items() if k.startswith(("loss", "val", "grad", "tok"))} for row in read_log(path)]
            for path in (folder / "two-dropout", folder / "two-broken")
        ]
        for row in [*logs[0], *logs[1]]:
            row.pop("tokens_per_second", None)
        assert logs[0] == logs[1]

    def test_each_process_has_its_random_state_in_the_checkpoint(self, compared):
        checkpoint = compared[0] / "two-dropout/checkpoints/checkpoint-4"
        listed = json.loads((checkpoint / "manifest.json").read_text())
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= listed.keys()
        assert listed.keys() | {"manifest.json"} == {path.name for path in checkpoint.iterdir()}
        # Each drops out other units: the same ones on other texts would be half the noise.
        states = [torch.load(checkpoint / f"rng_state_{rank}.pth", weights_only=False)["cpu"] for rank in range(2)]
        assert not torch.equal(*states)


@pytest.mark.slow
class TestShards:
    """Whole trainings whose weights, gradients and optimizer are cut in two."""

    @pytest.mark.parametrize("name", [*SHARDED, "two-then-one", "one-then-two"])
    def test_weights_are_those_of_one_process(self, compared, name):
        folder, stopped, _ = compared
        sharded = f"shards-{name}" if name in SHARDED else name
        assert stopped[sharded] == (("CrashError",) * 2 if name == "two-then-one" else (None, None))
        one = weights_of(folder / f"one-{name if name in SHARDED else 'causal'}")
        two = weights_of(folder / sharded)
        assert two.keys() == one.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=2e-6)

    @pytest.mark.parametrize("name", SHARDED)
    def test_log_and_finished_model_are_those_of_one_process(self, compared, name):
        folder = compared[0]
        one, two = (read_log(folder / f"{how}-{name}") for how in ("one", "shards"))
        assert [row["step"] for row in two] == [row["step"] for row in one]
        for mine, other in zip(two, one, strict=True):
            for key in other.keys() - {"tokens_per_second", "seconds", "peak_memory_mib"}:
                assert mine[key] == pytest.approx(other[key], rel=1e-4), (mine["step"], key)
        one, two = (gerund.load(folder / f"{how}-{name}" / "model") for how in ("one", "shards"))
        ids = torch.arange(20)[None]
        with torch.no_grad():
            torch.testing.assert_close(two.model(ids).logits, one.model(ids).logits, rtol=0, atol=2e-2)
        assert float(one.encode("a cat") @ two.encode("a cat")) > 0.999

    def test_each_process_writes_its_rows(self, compared):
        checkpoint = compared[0] / "shards-causal/checkpoints/checkpoint-4"
        listed = json.loads((checkpoint / "manifest.json").read_text())
        files = {f"{stem}-0000{rank}-of-00002.safetensors" for stem in (WEIGHTS, OPTIMIZER) for rank in (1, 2)}
        assert files <= listed.keys()
        assert not [name for name in listed if name.startswith("optimizer.pt")]
        sizes = [listed[name] for name in sorted(files)]
        assert max(sizes[:2]) < 1.1 * min(sizes[:2])  # half of the state each
        assert newest_checkpoint(checkpoint.parent)[0] == checkpoint
        (checkpoint / min(files)).rename(checkpoint / "elsewhere")
        assert newest_checkpoint(checkpoint.parent)[1] == {checkpoint: f"{min(files)} is missing"}
        (checkpoint / "elsewhere").rename(checkpoint / min(files))


def weights_of(folder):
    stored = Stored.open(folder / "checkpoints/checkpoint-4", WEIGHTS)
    return {name: stored.rows(name, 0, shape[0]) for name, shape in stored.shapes.items()}


@pytest.mark.slow
class TestMistakes:
    def test_batches_that_cannot_be_shared(self, compared):
        folder, stopped, _ = compared
        assert stopped["refused-mntp"] == ("mntp: 2 processes cannot share a batch of 3",) * 2
        assert stopped["refused-causal"] == ("causal: 2 processes cannot share 3 blocks of the decay",) * 2
        assert not [path for path in folder.iterdir() if path.name.startswith("refused")]

    def test_a_folder_that_another_training_writes(self, paired_corpus, base, tmp_path):
        """The first process alone takes the lock; what it is refused with, the other says too."""
        out = tmp_path / "out"
        content = {**recipes(paired_corpus, base, tmp_path / "cache")["causal"], "output": str(out)}
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content), "utf-8")
        jobs = [{"recipe": str(tmp_path / "recipe.yaml"), "overrides": []}]
        (tmp_path / "jobs.json").write_text(json.dumps(jobs))
        with hold(out):
            start_two(work, tmp_path)
            assert [path.name for path in out.iterdir()] == ["lock"]
        expected = [f"process {os.getpid()} is writing {out} already; wait for it or choose another name"]
        for rank in range(2):
            assert json.loads((tmp_path / f"stopped-{rank}.json").read_text()) == expected


def steps_of(corpus, base, cache, teacher):
    """Return recipes without chance in them that take every objective together through one step."""
    found = {name: content for name, content in recipes(corpus, base, cache).items() if name in SAME}
    # Two processes add in another order than one, and a temperature of 0.05 multiplies what that rounds by twenty.
    milder = [{**own, "temperature": 1.0} if own["kind"] == "simcse" else own for own in found["hybrid"]["objectives"]]
    found["hybrid"] = {**found["hybrid"], "objectives": milder}
    adapter = found["unimae"]
    looking = {"attention": "bidir", "pooling": "mean"}
    found["sscl"] = {**adapter, "encoder": looking, "objectives": [{"kind": "sscl", **TEXTS, "projection": 8}]}
    distill = {"kind": "distill", "teacher": str(teacher), **TEXTS, "layers": [1], "token_vectors": True}
    found["distill"] = {**adapter, "encoder": looking, "objectives": [distill]}
    found["span"] = {**found["gur"], "objectives": [{"kind": "span_corruption", **TEXTS}]}
    # Plans that run a layer twice, within its own pass and as a stream beside it, with states computed anew.
    for name, attention in (("parallel", "inter-bidir"), ("stack", "extra-bidir"), ("extend", "extend-bidir")):
        found[name] = {
            **adapter,
            "model": {**adapter["model"], "gradient_checkpointing": True},
            "encoder": {"attention": attention, "k": 2, "pooling": "mean"},
            "objectives": [{"kind": "sscl", **TEXTS}],
        }
    return found


STEPS = (*SAME, "sscl", "distill", "span", "parallel", "stack", "extend")


@pytest.fixture(scope="module")
def steps(paired_corpus, base, tmp_path_factory):
    """Take one step by every recipe in one process, and in two that begin with the first one's weights."""
    folder = tmp_path_factory.mktemp("steps")
    teacher = save_tiny(folder / "teacher", "llama")
    expected = {}
    for name, content in steps_of(paired_corpus, base, folder / "cache", teacher).items():
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content, "output": str(folder / "out")}), "utf-8")
        expected[name] = one_step(load_recipe(path), 1)
    start_two(work_steps, folder)
    return folder, expected


@pytest.mark.slow
class TestOneStep:
    @pytest.mark.parametrize("how", ["none", "fsdp2"])
    @pytest.mark.parametrize("name", STEPS)
    def test_equals_that_of_one_process(self, steps, name, how):
        """Losses and gradients, by DDP and FSDP2, whatever the other process began with."""
        folder, expected = steps
        one, two = expected[name], load_file(folder / f"{name}-{how}.safetensors")
        assert two.keys() == one.keys()
        scale = max(value.abs().max().item() for key, value in one.items() if key.startswith("gradient"))
        assert scale > 0
        for key, value in one.items():
            near = 1e-6 * (scale if key.startswith("gradient") else max(1.0, value.abs().item()))
            torch.testing.assert_close(two[key], value, rtol=0, atol=near, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.slow
def test_two_machines(tmp_path):
    """One process a machine makes what lies on its disk, and a folder that only one of them has is refused."""
    start_two(work_nodes, tmp_path)
    assert (tmp_path / "order.txt").read_text().splitlines() == ["0 begins", "0 ends", "1 begins", "1 ends"]
    refused = f"process 1 does not see what the first one writes into {tmp_path / 'own-'}"
    for rank in range(2):
        shared, own = json.loads((tmp_path / f"nodes-{rank}.json").read_text())
        assert shared is None
        assert own.startswith(f"{refused}{rank}: several nodes need an output folder that all of them share")
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.slow
def test_the_command_starts_processes_itself(paired_corpus, base, tmp_path):
    """``--processes``: the first one alone says what was made."""
    content = recipes(paired_corpus, base, tmp_path / "cache")["unimae"]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**content, "output": str(tmp_path / "out"), "sharding": "fsdp2"}), "utf-8")
    done = started("train", str(path), "--processes", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == str(tmp_path / "out" / "model")
    assert done.stderr.count("step 4/4  loss") == 1


def started(*arguments):
    """Run gerund as a program of its own; one that hangs is asked to end, so that it ends its processes."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gerund", *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, told = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            said, told = process.communicate(timeout=60)
            raise
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, said, told)


@pytest.mark.slow
def test_a_mistake_in_one_process_ends_both_soon(paired_corpus, base, tmp_path):
    """The first process alone reads files; the other must not wait for it in vain."""
    content = recipes(paired_corpus, base, tmp_path / "cache")["unimae"]
    content["objectives"][1]["pairs"] = {"files": ["absent.jsonl"]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**content, "output": str(tmp_path / "out")}), "utf-8")
    done = started("train", str(tmp_path / "recipe.yaml"), "--processes", "2")
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("gerund: error: ")]
    assert f"gerund: error: {paired_corpus / 'absent.jsonl'}: no such file" in told[0]
    # The other is stopped by the launcher, or finds out and says so.
    assert all("another process of this training has ended" in line for line in told[1:])
    # Neither torch's call nor its launcher's report.
    assert "distributed" not in done.stderr
    assert not (tmp_path / "out" / "recipe.json").exists()
