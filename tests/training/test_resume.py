"""A training that was cut short ends with the very same weights; others in its folder are refused, as are changes."""

import json
import os
import re
import shutil
import signal

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from gerund.errors import ConfigError, InputError, OutputExistsError, ResourceError
from gerund.jobs.files import LOCK, lock_folder
from gerund.training.corpus.texts import Sources
from gerund.training.objectives.base import prepare_objectives
from gerund.training.recipe import Recipe, load_recipe
from gerund.training.run import train
from gerund.training.run_folder import announce, check_resumable, check_same_data, newest_checkpoint
from gerund.training.trainable_model import prepare_model
from tests.cli.helpers import run_cli
from tests.training.conftest import adapter_settings, plain_settings, sentences
from tests.training.objectives.recipes import passage, text
from tests.training.outcomes import CrashError, assert_equal_states, crashing, losses, read_log, state


@pytest.fixture
def signals():
    """Let signals that end a program raise ``KeyboardInterrupt``."""
    before = {number: signal.signal(number, signal.default_int_handler) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class TestResume:
    @pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
    @pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
    def test_an_interruption_keeps_the_step_it_came_in(self, run, whole, tmp_path, capfd, signals, number):
        with crashing(5, lambda: signal.raise_signal(number)), pytest.raises(KeyboardInterrupt) as caught:
            run("cut")
        assert signal.getsignal(number) == signal.default_int_handler
        assert caught.value.__notes__ == [f"step 7 is kept in {tmp_path / 'cut'}: give --resume to go on from there"]
        assert "gerund: ending after this step, with a checkpoint; once more ends at once\n" in capfd.readouterr().err
        run("cut", resume=True)
        assert "resuming at step 7 of 12" in capfd.readouterr().err
        assert_equal_states(whole, tmp_path / "cut")
        assert read_log(whole)[-1]["tokens"] == read_log(tmp_path / "cut")[-1]["tokens"]

    @pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
    def test_a_second_interruption_ends_at_once(self, run, tmp_path, signals):
        def twice():
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

        with crashing(5, twice), pytest.raises(KeyboardInterrupt) as caught:
            run("cut")
        assert caught.value.__notes__ == [f"step 4 is kept in {tmp_path / 'cut'}: give --resume to go on from there"]

    @pytest.mark.slow
    def test_resume_where_there_is_nothing_starts(self, run):
        assert run("new", "steps=6", "save_steps=6", resume=True).is_dir()

    @pytest.mark.slow
    def test_half_written_checkpoints_are_removed_by_name(self, run, whole, tmp_path, capsys):
        with crashing(8), pytest.raises(CrashError):
            run("broken")
        with pytest.raises(OutputExistsError, match="go on with --resume"):
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
        assert_equal_states(whole, tmp_path / "broken")
        assert losses(whole) == losses(tmp_path / "broken")

    @pytest.mark.slow
    def test_manifest_finds_every_kind_of_damage(self, whole, tmp_path):
        shutil.copytree(whole, tmp_path / "out")
        checkpoints = tmp_path / "out" / "checkpoints"
        last = checkpoints / "checkpoint-12"
        assert newest_checkpoint(checkpoints) == (last, {})
        whole = (last / "scheduler.pt").read_bytes()
        (last / "scheduler.pt").write_bytes(whole[:-1])
        problem = f"scheduler.pt has {len(whole) - 1} bytes instead of {len(whole)}"
        assert newest_checkpoint(checkpoints) == (checkpoints / "checkpoint-8", {last: problem})
        for content in ("{", "[]", "{}", "null", "\0\0"):
            (last / "manifest.json").write_text(content, "utf-8")
            assert newest_checkpoint(checkpoints)[1] == {last: "its manifest is unreadable"}
        assert newest_checkpoint(tmp_path / "absent") == (None, {})

    @pytest.mark.slow
    def test_shorter_end_of_a_stable_phase_equals_planning_it(self, run, tmp_path):
        run("planned", "steps=10")
        with crashing(4), pytest.raises(CrashError):
            run("cut", "steps=40")
        run("cut", "steps=10", resume=True)
        assert_equal_states(tmp_path / "planned", tmp_path / "cut")

    @pytest.mark.slow
    def test_changed_settings_and_data_are_refused(self, run, corpus, tmp_path):
        with crashing(8), pytest.raises(CrashError):
            run("out")
        message = r"sources\.a\.weight was 2\.0 and is 3\.0; .*learning_rate was 0\.01 and is 0\.1; seed was 0"
        with pytest.raises(ConfigError, match=message):
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


class TestLock:
    @pytest.mark.slow
    def test_another_training_in_the_same_folder_is_refused(self, run, tmp_path):
        with (
            lock_folder(tmp_path / "out"),
            pytest.raises(InputError, match=rf"^process {os.getpid()} is writing .*out already; wait"),
        ):
            run("out")
        assert not (tmp_path / "out").exists()
        run("out", "steps=6", "save_steps=6")
        assert not (tmp_path / "out" / LOCK).exists()

    def test_a_folder_that_cannot_be_locked(self, run, tmp_path, monkeypatch):
        def refuse(self):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("filelock.FileLock.acquire", refuse)
        with pytest.raises(ResourceError, match=r"cannot write .*out: Permission denied"):
            run("out")


def told_losses(folder):
    """Return what the log says about the training and nothing about the machine."""
    timing = ("tokens_per_second", "seconds", "peak_memory_mib")
    return [{key: value for key, value in row.items() if key not in timing} for row in read_log(folder)]


def files(folder):
    """Return the contents of a model's files, without what says how long it took."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "training.json"
    }


def assert_equal_runs(one, other):
    assert_equal_states(one, other)
    assert told_losses(one) == told_losses(other)
    assert sorted(path.name for path in (one / "snapshots").iterdir()) == ["step-3", "step-6"]
    for name in ("model", "snapshots/step-3", "snapshots/step-6"):
        assert files(one / name) == files(other / name), name
    tokens = [json.loads((folder / "model/training.json").read_text())["tokens"] for folder in (one, other)]
    assert tokens[0] == tokens[1] > 0


def everything(settings):
    """Return a recipe in which whatever samples random numbers or holds state takes part."""
    texts = {"sources": ["a"], "batch_size": 4, "length": 24}
    settings["model"] |= {"gradient_checkpointing": True, "lora": {"rank": 4, "alpha": 8, "dropout": 0.1}}
    settings["encoder"] = {"attention": "causal", "pooling": "last", "append_eos": True}
    settings["objectives"] = [
        {"kind": "unimae", **texts, "micro_batch_size": 2, "weight": [[0, 1], [5, 0.2]]},
        {"kind": "simcse", **texts, "micro_batch_size": 2, "unit": "sentences", "weight": [[0, 0], [1, 1], [4, 0.5]]},
        {"kind": "mntp", **texts, "micro_batch_size": 3, "batch_size": 3, "weight": [[0, 1], [2, 0], [4, 1]]},
    ]
    settings["optimizer"] = {"learning_rate": 0.01, "head_learning_rate": 0.02}
    settings["schedule"] = {"name": "wsd", "warmup_steps": 1, "decay_steps": 3}
    settings["data"]["validation_tokens"] = 96
    return settings | {"steps": 7, "save_steps": 2, "log_steps": 1, "eval_steps": 3, "snapshot_steps": 3}


@pytest.mark.slow
class TestEverything:
    """Adapters, heads, dropout, parts and weight schedules together."""

    @pytest.fixture
    def settings(self, adapting):
        return everything(adapting)

    @pytest.fixture(scope="class")
    @classmethod
    def whole(cls, corpus, tmp_path_factory, base):
        recipe = everything(adapter_settings(plain_settings(corpus, tmp_path_factory), base))
        return train(Recipe.model_validate(recipe)).parent

    def test_end_bit_equal(self, whole, run, tmp_path):
        """The crash is in the decay, with a snapshot that is younger than the checkpoint."""
        with crashing(5), pytest.raises(CrashError):
            run("broken")
        run("broken", resume=True)
        assert_equal_runs(whole, tmp_path / "broken")
        names = state(whole)
        assert any("lora_A" in name for name in names)
        assert any("losses.unimae.decoder" in name for name in names)

    def test_a_snapshot_of_an_abandoned_end_is_replaced(self, whole, run, tmp_path):
        """Here step 6 was in the decay of the first attempt, and it is not in that of the second."""
        with crashing(5), pytest.raises(CrashError):
            run("cut")
        old = files(tmp_path / "cut/snapshots/step-6")
        shutil.rmtree(tmp_path / "cut/checkpoints/checkpoint-6")
        run("cut", "steps=9", resume=True)
        new = files(tmp_path / "cut/snapshots/step-6")
        assert old == files(whole / "snapshots/step-6")
        assert {name for name in old if old[name] != new[name]} == {"adapter/adapter_model.safetensors", "gerund.json"}

    def test_a_full_disk_keeps_whole_checkpoints_and_resumes(self, whole, run, tmp_path, monkeypatch):
        original = torch.save

        def full(*args, **kwargs):
            if (tmp_path / "broken/checkpoints/checkpoint-2/manifest.json").exists():
                raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(torch, "save", full)
            with pytest.raises(ResourceError, match=r"^the disk is full; whole checkpoints are kept, make room and go"):
                run("broken")
        assert newest_checkpoint(tmp_path / "broken/checkpoints")[0].name == "checkpoint-2"
        run("broken", resume=True)
        assert_equal_runs(whole, tmp_path / "broken")

    def test_a_full_disk_at_the_finished_model(self, whole, run, tmp_path, monkeypatch):
        def full(*_, **__):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        with monkeypatch.context() as patch:
            patch.setattr("peft.peft_model.safe_save_file", full)
            with pytest.raises(ResourceError, match=r"^the disk is full"):
                run("broken", "snapshot_steps=null")
        assert not [path for path in (tmp_path / "broken").iterdir() if "model" in path.name]
        run("broken", "snapshot_steps=null", resume=True)
        # Snapshots, which the other training took, change nothing.
        assert_equal_states(whole, tmp_path / "broken")
        assert files(tmp_path / "broken/model") == files(whole / "model")
        assert told_losses(tmp_path / "broken") == told_losses(whole)


def write_pairs(path, seed):
    rows = [
        {name: sentences(f"{seed}{name}{i}", 1) for name in ("query", "positive", "text_a", "text_b")}
        for i in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_passages(path, seed):
    rng = np.random.default_rng(seed)
    rows = [passage(number, text(rng, 9), text(rng, 4)) for number in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


OBJECTIVES = {
    "gur": {"kind": "gur", "pairs": {"files": ["pairs.jsonl"]}},
    "sscl": {"kind": "sscl", "pairs": {"files": ["pairs.jsonl"]}},
    "rankgen": {
        "kind": "rankgen",
        "passages": ["passages"],
        "validation": ["held.jsonl"],
        "negatives": "inbook",
        "continuation_length": 16,
    },
    "distill": {"kind": "distill", "teacher": "vectors.parquet"},
}


class TestFiles:
    """Files of pairs, passages and vectors, which no token cache knows."""

    @pytest.fixture
    def settings(self, adapting, tmp_path):
        """Return a recipe that reads files in a folder of its own."""
        sizes = {"batch_size": 8, "length": 16}
        adapting["data"] = {"folder": str(tmp_path)}
        adapting["objectives"] = [{"kind": "contrastive", "pairs": {"files": ["pairs.jsonl"]}, **sizes}]
        write_pairs(tmp_path / "pairs.jsonl", 0)
        return {**adapting, "steps": 2, "save_steps": 2}

    def test_other_pairs_under_the_same_name_are_refused(self, run, tmp_path):
        shutil.rmtree(run("out"))
        whole = (tmp_path / "pairs.jsonl").read_bytes()
        write_pairs(tmp_path / "pairs.jsonl", 1)
        with pytest.raises(ConfigError, match=r"the files in data\.folder have changed: pairs\.jsonl$"):
            run("out", "steps=4", resume=True)
        # The same content is enough, in another folder as well.
        (tmp_path / "moved").mkdir()
        (tmp_path / "moved" / "pairs.jsonl").write_bytes(whole)
        run("out", "steps=4", f"data.folder={tmp_path / 'moved'}", resume=True)

    @pytest.mark.parametrize("kind", OBJECTIVES)
    def test_every_objective_with_files_of_its_own_notes_them(self, settings, write_recipe, base, tmp_path, kind):
        settings["objectives"] = [{**OBJECTIVES[kind], "batch_size": 8, "length": 16}]
        passages = tmp_path / "passages"
        passages.mkdir()
        write_passages(passages / "part-00000.jsonl", 0)
        write_passages(tmp_path / "held.jsonl", 1)

        def embed(seed):
            (tmp_path / "texts.txt").write_text("\n".join(sentences(f"{seed}{i}", 1) for i in range(16)), "utf-8")
            vectors = tmp_path / "vectors.parquet"
            vectors.unlink(missing_ok=True)
            assert run_cli("embed", tmp_path / "texts.txt", "-m", base, "--keep-text", "-o", vectors).code == 0

        changes = {
            "pairs.jsonl": [lambda: write_pairs(tmp_path / "pairs.jsonl", 1)],
            # One document more, and another one.
            "passages": [
                lambda: write_passages(passages / "part-00001.jsonl", 2),
                lambda: write_passages(passages / "part-00000.jsonl", 3),
            ],
            "held.jsonl": [lambda: write_passages(tmp_path / "held.jsonl", 4)],
            "vectors.parquet": [lambda: embed(1)],
        }
        if kind == "distill":
            embed(0)
        recipe = load_recipe(write_recipe(settings))
        model = prepare_model(recipe, write=False)
        sources = Sources(recipe, model.tokenizer)
        prepare_objectives(recipe, model, sources)
        read = {"rankgen": ["held.jsonl", "passages"], "distill": ["vectors.parquet"]}.get(kind, ["pairs.jsonl"])
        assert sorted(sources.summary()["files"]) == read
        for name in read:
            for change in changes[name]:
                check_same_data(tmp_path, sources.summary(), resuming=False)
                check_same_data(tmp_path, sources.summary(), resuming=True)
                change()
                again = Sources(recipe, model.tokenizer)
                prepare_objectives(recipe, model, again)
                with pytest.raises(ConfigError, match=f"have changed: {name}$"):
                    check_same_data(tmp_path, again.summary(), resuming=True)
                sources = again


def test_a_name_in_brackets_is_no_markup(capsys):
    announce("tokenising the training documents of wiki[en] and wiki[/en]")
    assert capsys.readouterr().err == "tokenising the training documents of wiki[en] and wiki[/en]\n"


def test_what_saves_memory_may_change_and_nothing_else(tmp_path, adapting, write_recipe):
    adapting["objectives"] = [{"kind": "mntp", "length": 16, "batch_size": 8}]
    adapting["data"]["sources"] = [{"name": "a", "files": ["a.train.jsonl"]}]
    recipe = load_recipe(write_recipe(adapting))
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.plain()))
    less = ["objectives.mntp.micro_batch_size=2", "model.gradient_checkpointing=true"]
    check_resumable(load_recipe(write_recipe(adapting), less), tmp_path, 0)
    for override, told in {
        "objectives.mntp.batch_size=4": "objectives.mntp.batch_size was 8 and is 4",
        "objectives.mntp.weight=2": "objectives.mntp.weight.0.1 was 1.0 and is 2.0",
        "model.lora.dropout=0.5": "model.lora.dropout was 0.0 and is 0.5",
        "encoder.prompt=Read": 'encoder.prompt was null and is "Read"',
        "objectives=[{kind: causal, length: 16, batch_size: 8}]": "objectives",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(f"since settings have changed: {told}")):
            check_resumable(load_recipe(write_recipe(adapting), [override]), tmp_path, 0)


def test_files_of_an_objective_that_joins_in_later_are_new(tmp_path):
    caches = {"a training documents 0": [1, 2]}
    check_same_data(tmp_path, {**caches, "files": {"a": [1, "x"]}}, resuming=False)
    check_same_data(tmp_path, {**caches, "files": {"b": [2, "y"]}}, resuming=True)
    assert json.loads((tmp_path / "data.json").read_text("utf-8")) == {
        **caches,
        "files": {"a": [1, "x"], "b": [2, "y"]},
    }
    with pytest.raises(ConfigError, match=r"have changed: a, b$"):
        check_same_data(tmp_path, {**caches, "files": {"a": [1, "z"], "b": [2, "z"]}}, resuming=True)
    with pytest.raises(ConfigError, match=r"have changed$"):
        check_same_data(tmp_path, {"files": {"a": [1, "x"]}}, resuming=True)
