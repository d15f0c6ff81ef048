"""A whole training in a second: its folder, its log, and a resume that ends with the very same weights."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from gerund.errors import ConfigError, GerundError, InputError, OutputExistsError, ResourceError
from gerund.jobs.locks import LOCK, hold
from gerund.training.estimate import estimate
from gerund.training.objectives.causal import CausalLosses
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from gerund.training.run_folder import newest_checkpoint
from gerund.training.step import TrainingModule
from gerund.training.trainer import GerundTrainer


class CrashError(Exception):
    pass


@pytest.fixture
def run(settings, write_recipe, tmp_path):
    def run(output, *overrides, resume=False):
        recipe = load_recipe(write_recipe(settings), [f"output={tmp_path / output}", *overrides])
        return train(recipe, resume=resume)

    return run


def crash_at(monkeypatch, step):
    """Let the training die in the middle of optimizer step ``step``, between two of its parts."""
    original, seen = TrainingModule.forward, []

    def forward(self, *args, **kwargs):
        seen.append(torch.is_grad_enabled())
        if self.training and len([one for one in seen if one]) == 2 * step + 2:
            raise CrashError
        return original(self, *args, **kwargs)

    monkeypatch.setattr(TrainingModule, "forward", forward)


def state(folder):
    """Return weights and optimizer state of the last checkpoint, flattened."""
    last = newest_checkpoint(folder / "checkpoints")[0]
    found = dict(load_file(last / "trainable.safetensors"))
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    for part, content in optimizer.items():
        for number, values in content["state"].items():
            found.update({f"{part}.{number}.{key}": torch.as_tensor(value) for key, value in values.items()})
    return found


def assert_equal_states(one, other):
    one, other = state(one), state(other)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def read_log(folder):
    return [json.loads(line) for line in (folder / "log.jsonl").read_text("utf-8").splitlines()]


def losses(folder):
    return [(row["step"], row.get("loss"), row.get("val_a")) for row in read_log(folder)]


class TestWhole:
    def test_folder_log_and_model(self, run, tmp_path):
        model_folder = run("out")
        assert model_folder == tmp_path / "out" / "model"
        assert sorted(path.name for path in model_folder.iterdir()) == [
            "config.json",
            "generation_config.json",
            "gerund.json",
            "model.safetensors",
            "tokenizer.json",
            "tokenizer_config.json",
            "training.json",
        ]
        assert len({path.stat().st_mode for path in model_folder.iterdir()}) == 1
        report = json.loads((model_folder / "training.json").read_text("utf-8"))
        assert report["tokens"] == 12 * 128
        assert set(report["validation_loss"]) == {"a"}
        assert set(report["epochs"]) == {"a", "b"}
        assert "folder" not in report["recipe"]["data"]
        assert "output" not in report["recipe"]

        model, tokenizer = (k.from_pretrained(str(model_folder)) for k in (AutoModelForCausalLM, AutoTokenizer))
        assert model.dtype == torch.bfloat16
        assert model.config.vocab_size == len(tokenizer)
        assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (0, 1, 2)
        assert model.generation_config.eos_token_id == 1
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
        trained = load_file(tmp_path / "out/checkpoints/checkpoint-12/trainable.safetensors")
        for name, parameter in model.named_parameters():
            assert torch.equal(trained[f"model.{name}"].bfloat16(), parameter)

        rows = read_log(tmp_path / "out")
        assert [row["step"] for row in rows] == [2, 4, 6, 6, 8, 10, 12, 12]
        first = {"step", "loss", "learning_rate", "tokens_per_second", "tokens", "seconds", "peak_memory_mib"}
        assert first <= rows[0].keys()
        assert rows[0]["tokens"] == 256
        assert rows[-1]["val_a"] < 5.7 < rows[0]["loss"]

    def test_log_has_the_schedule(self, run, tmp_path):
        run("out")
        rows = read_log(tmp_path / "out")
        rates = [row["learning_rate"] for row in rows if "loss" in row]
        assert rates[1:4] == pytest.approx([0.01, 0.01, 0.01])
        assert rates[-1] == pytest.approx(0.01 * (1 - (3 / 4) ** 0.5))

    def test_accumulation_equals_one_batch(self, run, tmp_path):
        run("two")
        run("one", "objectives.causal.micro_batch_size=8")
        # Both see the same rows; only the order of additions differs. (A mean per micro-batch of ragged
        # counts would not agree.)
        one, two = (read_log(tmp_path / name)[0] for name in ("one", "two"))
        for key in ("loss", "grad_norm"):
            assert one[key] == pytest.approx(two[key], rel=1e-4)

    def test_the_stable_phase_does_not_depend_on_the_number_of_steps(self, run, tmp_path):
        run("short", "steps=8")
        run("long")
        assert losses(tmp_path / "short")[:2] == losses(tmp_path / "long")[:2]

    def test_long_blocks_in_the_decay(self, run, tmp_path, monkeypatch):
        shapes = []
        original = TrainingModule.forward

        def forward(self, name, part, **kwargs):
            if self.training:
                shapes.append(tuple(part["input_ids"].shape))
            return original(self, name, part, **kwargs)

        monkeypatch.setattr(TrainingModule, "forward", forward)
        run("long", "objectives.causal.decay_length=32")
        assert shapes == [(4, 16)] * 16 + [(4, 32)] * 4
        run("short")
        assert losses(tmp_path / "long")[:4] == losses(tmp_path / "short")[:4]

    def test_finished_output_is_not_overwritten(self, run, tmp_path):
        run("out", "steps=6")
        for resume in (False, True):
            with pytest.raises(OutputExistsError, match="model is there already"):
                run("out", "steps=6", resume=resume)
        (tmp_path / "file").write_text("x")
        with pytest.raises(OutputExistsError, match="is a file"):
            run("file")
        before = sorted((tmp_path / "out" / "model").iterdir())
        with pytest.raises(OutputExistsError, match="is a model's own folder"):
            run("out/model")
        assert sorted((tmp_path / "out" / "model").iterdir()) == before

    def test_a_loss_that_is_no_number_stops_with_its_batch_saved(self, run, tmp_path, monkeypatch):
        original = CausalLosses.__call__
        calls = []

        def forward(self, model, batch):
            calls.append(batch)
            factor = float("nan") if len(calls) == 5 else 1.0
            return {name: value * factor for name, value in original(self, model, batch).items()}

        monkeypatch.setattr(CausalLosses, "__call__", forward)
        with pytest.raises(GerundError, match=r"the loss of step 3 is no finite number \(causal nan\); its batch"):
            run("out")
        saved = load_file(tmp_path / "out" / "failed-step-3.safetensors")
        assert saved["causal.input_ids"].shape == (8, 16)
        assert torch.equal(saved["causal.input_ids"][:4], calls[4]["input_ids"])

    def test_a_gradient_that_is_no_number_stops_before_it_spoils_the_weights(self, run, monkeypatch):
        original = CausalLosses.__call__

        def forward(self, model, batch):
            [total] = original(self, model, batch).values()
            # The root of 0 is 0, and its slope is infinite.
            return {"causal": total + (total * 0).sqrt()}

        monkeypatch.setattr(CausalLosses, "__call__", forward)
        with pytest.raises(GerundError, match=r"the gradient of step 1 is no finite number"):
            run("out")

    @pytest.mark.parametrize(
        ("error", "message"),
        [
            (OSError(28, "No space left on device"), "the disk is full; whole checkpoints are kept"),
            (
                RuntimeError("DefaultCPUAllocator: can't allocate memory"),
                "memory ran out; set a smaller micro_batch_size",
            ),
        ],
    )
    def test_exhausted_machine(self, run, monkeypatch, error, message):
        def save(*_):
            raise error

        monkeypatch.setattr(GerundTrainer, "_save", save)
        with pytest.raises(ResourceError, match=message):
            run("out")


class TestResume:
    @pytest.mark.parametrize("step", [1, 7, 11])
    def test_crash_and_resume_end_bit_equal(self, run, tmp_path, monkeypatch, step):
        run("whole")
        with monkeypatch.context() as patch:
            crash_at(patch, step)
            with pytest.raises(CrashError):
                run("broken")
        with pytest.raises(OutputExistsError, match="go on with --resume"):
            run("broken")
        run("broken", resume=True)
        assert_equal_states(tmp_path / "whole", tmp_path / "broken")
        assert losses(tmp_path / "whole") == losses(tmp_path / "broken")

    def test_crash_before_the_model_is_written(self, run, tmp_path, monkeypatch):
        run("whole")
        with monkeypatch.context() as patch:
            patch.setattr("gerund.training.run.write_model", lambda *_, **__: (_ for _ in ()).throw(CrashError))
            with pytest.raises(CrashError):
                run("broken")
        run("broken", resume=True)
        assert_equal_states(tmp_path / "whole", tmp_path / "broken")
        one, other = (tmp_path / name / "model/model.safetensors" for name in ("whole", "broken"))
        assert one.read_bytes() == other.read_bytes()

    def test_resume_where_there_is_nothing_starts(self, run):
        assert run("new", resume=True).is_dir()

    def test_half_written_checkpoints_are_removed_by_name(self, run, tmp_path, monkeypatch, capsys):
        run("whole")
        with monkeypatch.context() as patch:
            crash_at(patch, 9)
            with pytest.raises(CrashError):
                run("broken")
        checkpoints = tmp_path / "broken" / "checkpoints"
        (checkpoints / "checkpoint-8" / "optimizer.pt").unlink()
        (checkpoints / "checkpoint-400").mkdir()
        run("broken", resume=True)
        told = capsys.readouterr().err
        assert "removing checkpoint-8: optimizer.pt is missing" in told
        assert "removing checkpoint-400: cut short before it was complete" in told
        assert "resuming at step 4" in told
        assert not (checkpoints / "checkpoint-400").exists()
        assert_equal_states(tmp_path / "whole", tmp_path / "broken")

    def test_manifest_finds_every_kind_of_damage(self, run, tmp_path):
        run("out")
        checkpoints = tmp_path / "out" / "checkpoints"
        last = checkpoints / "checkpoint-12"
        assert newest_checkpoint(checkpoints) == (last, {})
        whole = (last / "scheduler.pt").read_bytes()
        (last / "scheduler.pt").write_bytes(whole[:-1])
        problem = f"scheduler.pt has {len(whole) - 1} bytes instead of {len(whole)}"
        assert newest_checkpoint(checkpoints) == (checkpoints / "checkpoint-8", {last: problem})
        (last / "manifest.json").write_text("{", "utf-8")
        assert newest_checkpoint(checkpoints)[1] == {last: "its manifest is unreadable"}
        assert newest_checkpoint(tmp_path / "absent") == (None, {})

    def test_shorter_end_of_a_stable_phase_equals_planning_it(self, run, tmp_path, monkeypatch):
        run("planned", "steps=10")
        with monkeypatch.context() as patch:
            crash_at(patch, 5)
            with pytest.raises(CrashError):
                run("cut", "steps=40")
        run("cut", "steps=10", resume=True)
        assert_equal_states(tmp_path / "planned", tmp_path / "cut")

    def test_settings_that_were_written_under_earlier_names_are_the_same(self, run, settings, tmp_path, monkeypatch):
        settings["objectives"] = [{"kind": "mntp", "length": 16, "batch_size": 8, "micro_batch_size": 4}]
        with monkeypatch.context() as patch:
            crash_at(patch, 8)
            with pytest.raises(CrashError):
                run("out")
        path = tmp_path / "out" / "recipe.json"
        before = path.read_text("utf-8").replace("mask_fraction", "mask_share")
        path.write_text(before.replace("random_fraction", "random_share"), "utf-8")
        assert (run("out", resume=True) / "model.safetensors").is_file()

    def test_changed_settings_and_data_are_refused(self, run, corpus, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            crash_at(patch, 9)
            with pytest.raises(CrashError):
                run("out")
        with pytest.raises(
            ConfigError,
            match=r"sources\.a\.weight was 2\.0 and is 3\.0; .*learning_rate was 0\.01 and is 0\.1; seed was 0",
        ):
            run("out", "seed=1", "optimizer.learning_rate=0.1", "data.sources.a.weight=3", resume=True)
        with pytest.raises(ConfigError, match="while the learning rate is stable, until step 6"):
            run("out", "steps=10", resume=True)
        (tmp_path / "other").mkdir()
        for path in corpus.iterdir():
            (tmp_path / "other" / path.name).write_bytes(path.read_bytes().replace(b"cat", b"catfish"))
        with pytest.raises(ConfigError, match=r"the files in data\.folder have changed"):
            run("out", f"data.folder={tmp_path / 'other'}", resume=True)
        (tmp_path / "out" / "recipe.json").unlink()
        with pytest.raises(ConfigError, match="is missing"):
            run("out", resume=True)

    @pytest.mark.slow
    def test_killed_process_resumes_bit_equal(self, settings, write_recipe, run, tmp_path):
        run("whole", "steps=400", "save_steps=20")
        recipe = write_recipe(settings, "killed.yaml")
        output = tmp_path / "killed"
        command = [sys.executable, "-m", "gerund.cli.main", "train", str(recipe), f"output={output}"]
        command += ["steps=400", "save_steps=20"]
        source = str(Path(__file__).parents[2] / "src")
        process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": source}, stderr=subprocess.DEVNULL)
        while not (output / "checkpoints" / "checkpoint-40" / "manifest.json").exists():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert not (output / "model").exists()
        run("killed", "steps=400", "save_steps=20", resume=True)
        assert_equal_states(tmp_path / "whole", output)


class TestLock:
    def test_another_training_in_the_same_folder_is_refused(self, run, tmp_path):
        with (
            hold(tmp_path / "out"),
            pytest.raises(InputError, match=rf"^process {os.getpid()} is writing .*out already; wait"),
        ):
            run("out")
        assert not (tmp_path / "out").exists()
        run("out")
        assert not (tmp_path / "out" / LOCK).exists()

    def test_a_second_process_is_refused_while_the_first_one_trains(self, run, tmp_path, monkeypatch):
        told, save_model = [], GerundTrainer.save_model
        script = f"""
from pathlib import Path
from gerund.errors import InputError
from gerund.jobs.locks import hold
try:
    with hold(Path({str(tmp_path / "out")!r})):
        print("not locked")
except InputError as error:
    print(error)
"""

        def save_while_another_starts(self, *args, **kwargs):
            save_model(self, *args, **kwargs)
            before = sorted(path.name for path in (tmp_path / "out").rglob("*"))
            told.append(subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True))
            assert sorted(path.name for path in (tmp_path / "out").rglob("*")) == before

        monkeypatch.setattr(GerundTrainer, "save_model", save_while_another_starts)
        assert (run("out", "steps=8", "save_steps=8") / "model.safetensors").is_file()
        [done] = told
        assert done.stdout.startswith(f"process {os.getpid()} is writing {tmp_path / 'out'} already")

    def test_a_lock_ends_with_its_process(self, run, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / LOCK).write_text("1\n")  # left by a process that was killed
        run("out", "steps=6")

    def test_a_folder_that_cannot_be_locked(self, run, tmp_path, monkeypatch):
        def refuse(self):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("filelock.FileLock.acquire", refuse)
        with pytest.raises(ResourceError, match=r"cannot write .*out: Permission denied"):
            run("out")


class TestModel:
    def test_mistakes_in_the_architecture(self, run):
        with pytest.raises(ConfigError, match=r"unknown field of model.config 'hiden_size'; valid are: .*hidden_size"):
            run("out", "model.config.hiden_size=3")
        with pytest.raises(ConfigError, match="'lama' is unknown to transformers"):
            run("out", "model.config.model_type=lama")
        with pytest.raises(ConfigError, match="has no model_type"):
            run("out", "model.config={hidden_size: 8}")
        with pytest.raises(ConfigError, match="makes no model: "):
            run("out", "model.config.hidden_size=many")
        run("out", "steps=6")  # a refused recipe leaves nothing in the way

    def test_other_machines(self, run, monkeypatch):
        monkeypatch.setattr("shutil.which", lambda _: None)
        with pytest.raises(ConfigError, match=r"needs a C\+\+ compiler"):
            run("out", "compile=true")

    def test_an_existing_tokenizer_is_used(self, run, tokenizer, tmp_path):
        tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
        folder = run("out", f"tokenizer={{path: {tmp_path / 'tokenizer'}}}", "steps=6")
        again = AutoTokenizer.from_pretrained(str(folder))
        assert again.backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()

    def test_bf16_and_adamw_train_too(self, run, tmp_path):
        run("out", "precision=bf16", "optimizer.name=adamw", "schedule={name: cosine}")
        assert losses(tmp_path / "out")[-1][2] < 5.7
        weights = load_file(tmp_path / "out/checkpoints/checkpoint-12/trainable.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}

    def test_estimate_of_every_kind_of_text_before_there_is_a_tokenizer(self, settings, write_recipe, tmp_path):
        objectives = "objectives=[{kind: mntp, length: 16, batch_size: 2}, {kind: simcse, length: 16, batch_size: 2}]"
        encoder = "encoder={attention: bidir, append_eos: true}"
        found = estimate(load_recipe(write_recipe(settings), [objectives, encoder, f"output={tmp_path / 'out'}"]))
        assert found.objectives == {"mntp": 32, "simcse": 64}

    def test_estimate_writes_nothing(self, settings, write_recipe, tmp_path):
        found = estimate(load_recipe(write_recipe(settings), [f"output={tmp_path / 'out'}"]))
        assert (found.tokens_per_step, found.tokens) == (128, 1536)
        attention, feed_forward, norms = 2 * 16 * 16 + 2 * 16 * 8, 3 * 16 * 32, 2 * 16
        assert found.trained_parameters == found.parameters == 320 * 16 + 2 * (attention + feed_forward + norms) + 16
        assert 0 < found.seconds_per_step < found.seconds
        assert not (tmp_path / "out").exists()
