"""The log once more, for a tracker that the recipe names: in the output folder, by objective, and nowhere unasked."""

import importlib.machinery
import importlib.util
import sys
import types

import pytest

from gerund.errors import MissingDependencyError
from tests.training.outcomes import read_log


@pytest.fixture
def settings(settings):
    return settings | {"steps": 4, "save_steps": 4, "eval_steps": 2, "schedule": {"name": "constant"}}


HAS_TENSORBOARD = importlib.util.find_spec("tensorboard") is not None
needs_tensorboard = pytest.mark.skipif(not HAS_TENSORBOARD, reason="needs the extra train")


def events_of(folder):
    """Read back what TensorBoard was given."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


@needs_tensorboard
@pytest.mark.slow
def test_tensorboard_gets_the_losses_and_validation_under_the_output(run):
    output = run("out", "report_to=[tensorboard]").parent
    events, rows = events_of(output / "tensorboard"), read_log(output)
    for key, name in {"loss": "train/loss", "loss_causal": "train/loss_causal", "val_a": "eval/a"}.items():
        found = {one.step: one.value for one in events.Scalars(name)}
        assert found == pytest.approx({row["step"]: row[key] for row in rows if key in row})
        assert len(found) == 2


@needs_tensorboard
@pytest.mark.slow
def test_the_users_own_folder_for_tensorboard_wins(run, tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "mine"))
    output = run("out", "report_to=[tensorboard]", "steps=1", "data.validation_tokens=64").parent
    assert events_of(tmp_path / "mine").Scalars("train/loss_causal")
    assert not (output / "tensorboard").exists()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_missing_package_is_one_sentence_before_anything_starts(run, tmp_path, monkeypatch, name):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=f"^report_to names {name}, .* not installed: pip install {name}$"):
        run("out", f"report_to=[{name}]")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("report_to", [[], pytest.param(["tensorboard"], marks=needs_tensorboard)])
def test_nobody_is_told_unasked(run, monkeypatch, report_to):
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
    output = run("out", f"report_to={report_to}", "steps=2", "save_steps=2").parent
    assert touched == []
    assert (output / "tensorboard").exists() == bool(report_to)
