"""Adapters, heads, dropout, parts and weight schedules together: a broken run ends as an unbroken one would have."""

import json
import shutil

import pytest
import torch
from safetensors import SafetensorError

from gerund.errors import ResourceError
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from gerund.training.run_folder import newest_checkpoint
from tests.training.outcomes import CrashError, assert_equal_states, read_log, state
from tests.training.processes.one_of_two import crashing


@pytest.fixture
def everything(adapting):
    """Return a recipe in which whatever samples random numbers or holds state takes part."""
    texts = {"sources": ["a"], "batch_size": 4, "length": 24}
    adapting["model"]["lora"]["dropout"] = 0.1
    adapting["model"]["gradient_checkpointing"] = True
    adapting["encoder"] = {"attention": "causal", "pooling": "last", "append_eos": True}
    adapting["objectives"] = [
        {"kind": "unimae", **texts, "micro_batch_size": 2, "weight": [[0, 1], [5, 0.2]]},
        {"kind": "simcse", **texts, "micro_batch_size": 2, "unit": "sentences", "weight": [[0, 0], [1, 1], [4, 0.5]]},
        {"kind": "mntp", **texts, "micro_batch_size": 3, "batch_size": 3, "weight": [[0, 1], [2, 0], [4, 1]]},
    ]
    adapting["optimizer"] = {"learning_rate": 0.01, "head_learning_rate": 0.02}
    adapting["schedule"] = {"name": "wsd", "warmup_steps": 1, "decay_steps": 3}
    adapting.update(steps=7, save_steps=2, log_steps=1, eval_steps=3, snapshot_steps=3)
    adapting["data"]["validation_tokens"] = 96
    return adapting


@pytest.fixture
def run(everything, write_recipe, tmp_path):
    def run(output, *overrides, resume=False, crash=None):
        recipe = load_recipe(write_recipe(everything), [f"output={tmp_path / output}", *overrides])
        with crashing(crash):
            return train(recipe, resume=resume)

    return run


@pytest.fixture(scope="module")
def finished():
    """Keep the run that all are compared with, so that it is carried out once."""
    return {}


@pytest.fixture
def whole(finished, run, tmp_path, tmp_path_factory):
    if not finished:
        run("whole")
        finished["folder"] = tmp_path_factory.mktemp("finished") / "whole"
        shutil.copytree(tmp_path / "whole", finished["folder"])
    return finished["folder"]


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


@pytest.mark.slow
class TestBrokenRuns:
    def test_end_bit_equal(self, whole, run, tmp_path):
        """The crash is in the decay, with a snapshot that is younger than the checkpoint."""
        with pytest.raises(CrashError):
            run("broken", crash=5)
        run("broken", resume=True)
        assert_equal_runs(whole, tmp_path / "broken")
        names = state(whole)
        assert any("lora_A" in name for name in names)
        assert any("losses.unimae.decoder" in name for name in names)

    def test_a_snapshot_of_an_abandoned_end_is_replaced(self, whole, run, tmp_path):
        """Here step 6 was in the decay of the first attempt, and it is not in that of the second."""
        with pytest.raises(CrashError):
            run("cut", crash=5)
        old = files(tmp_path / "cut/snapshots/step-6")
        shutil.rmtree(tmp_path / "cut/checkpoints/checkpoint-6")
        run("cut", "steps=9", resume=True)
        new = files(tmp_path / "cut/snapshots/step-6")
        assert old == files(whole / "snapshots/step-6")
        assert {name for name in old if old[name] != new[name]} == {"adapter/adapter_model.safetensors", "gerund.json"}


@pytest.mark.slow
class TestFullDisk:
    def test_keeps_whole_checkpoints_and_resumes(self, whole, run, tmp_path, monkeypatch):
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

    def test_at_the_finished_model(self, whole, run, tmp_path, monkeypatch):
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
