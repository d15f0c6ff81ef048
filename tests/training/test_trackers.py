"""The log once more, for a tracker that the recipe names: in the output folder, by objective, and nowhere unasked."""

import importlib.machinery
import sys
import types

import pytest

from gerund.errors import MissingDependencyError
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from tests.training.outcomes import read_log


@pytest.fixture
def run(settings, write_recipe, tmp_path):
    settings.update(steps=4, save_steps=4, eval_steps=2)
    settings["schedule"] = {"name": "constant"}

    def run(*overrides):
        train(load_recipe(write_recipe(settings), [f"output={tmp_path / 'out'}", *overrides]))
        return tmp_path / "out"

    return run


def stand_in(name):
    """Return an empty module that counts as installed."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    return module


@pytest.fixture
def written(monkeypatch):
    """Stand in for tensorboard; return its folder and what it was given."""
    written = {"folder": None, "scalars": []}

    class Writer:
        def __init__(self, log_dir):
            written["folder"] = log_dir

        def add_scalar(self, name, value, step):
            written["scalars"].append((name, step, value))

        def add_text(self, *_):
            pass

        def flush(self):
            pass

        def close(self):
            pass

    module = stand_in("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "tensorboard", stand_in("tensorboard"))
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return written


@pytest.mark.slow
def test_tensorboard_gets_the_losses_and_validation_under_the_output(run, written):
    output = run("report_to=[tensorboard]")
    assert written["folder"] == str(output / "tensorboard")
    names = {"loss": "train/loss", "loss_causal": "train/loss_causal", "val_a": "eval/a"}
    expected = [
        (names[key], row["step"], value) for row in read_log(output) for key, value in row.items() if key in names
    ]
    assert len(expected) == 6
    assert [one for one in written["scalars"] if one[0] in names.values()] == expected


@pytest.mark.slow
def test_the_users_own_folder_for_tensorboard_wins(run, written, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))
    run("report_to=[tensorboard]", "steps=1", "data.validation_tokens=64")
    assert written["folder"] == str(tmp_path / "mine")


@pytest.mark.slow
def test_real_event_files(run):
    pytest.importorskip("tensorboard", reason="needs the extra train")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    output = run("report_to=[tensorboard]")
    events = accumulator.EventAccumulator(str(output / "tensorboard"))
    events.Reload()
    losses = {one.step: one.value for one in events.Scalars("train/loss_causal")}
    assert losses == pytest.approx({row["step"]: row["loss_causal"] for row in read_log(output) if "loss" in row})
    assert "eval/a" in events.Tags()["scalars"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_one_sentence_before_anything_starts(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=f"^report_to names {name}, .* not installed: pip install {name}$"):
        run(f"report_to=[{name}]")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("report_to", [[], ["tensorboard"]])
def test_nobody_is_told_unasked(run, written, monkeypatch, report_to):
    touched = []

    class Watched(types.ModuleType):
        def __getattr__(self, name):
            if not name.startswith("__"):
                touched.append(name)
            raise AttributeError(name)

    for name in ("wandb", "trackio"):
        module = Watched(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    run(f"report_to={report_to}", "steps=2", "save_steps=2")
    assert touched == []
    assert bool(written["scalars"]) == bool(report_to)
