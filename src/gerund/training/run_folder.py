"""The folder of a run: who may use it, whether a run can go on in it, and which checkpoints are whole.

A checkpoint is whole once its manifest, written last, lists every file with its size. The Trainer itself takes the
highest number and would silently go on without a missing optimizer file.

Knows: which folder holds what. Does not know: how the model was trained, or how it is written (``finished_model``).
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gerund.errors import ConfigError, OutputExistsError
from gerund.jobs.files import write_whole
from gerund.training.corpus.sources import FILES
from gerund.training.objectives.registry import renamed_fields

if TYPE_CHECKING:
    from gerund.training.recipe import Recipe

MANIFEST = "manifest.json"
_NAME = re.compile(r"checkpoint-(\d+)$")

# These may differ between a run and its resumption: they do not change what a step computes.
_FREE = (
    "output", "steps", "compile", "sharding", "log_steps", "eval_steps", "save_steps", "keep_checkpoints",
    "snapshot_steps", "report_to",
)  # fmt: skip
# Of the data, and of an objective: neither changes a gradient (but for the order of additions).
_FREE_DATA = ("folder", "cache", "validation_tokens")


def check_output(output: Path, resume: bool) -> None:
    """Refuse a folder that is a model or holds a finished one, or an unfinished run that is not to be resumed."""
    if output.exists() and not output.is_dir():
        raise OutputExistsError(f"{output} is a file; an output is a folder")
    if any((output / name).exists() for name in ("config.json", "adapter_config.json")):
        raise OutputExistsError(f"{output} is a model's own folder; choose another output")
    if (output / "model").exists():
        raise OutputExistsError(
            f"{output} is finished, {output / 'model'} is there already; choose another output, or remove the whole "
            "folder to train anew"
        )
    if not resume and (output / "recipe.json").exists():
        raise OutputExistsError(f"{output} holds an unfinished run; go on with --resume or choose another output")


def check_resumable(recipe: "Recipe", output: Path, step: int) -> None:
    """Refuse to resume with settings under which the run so far would have gone differently.

    Raises:
        ConfigError: With the names of the settings that differ.
    """
    path = output / "recipe.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing, so nothing says what the checkpoints were trained with")
    before, now = renamed_fields(json.loads(path.read_text("utf-8"))), json.loads(recipe.model_dump_json())
    differing = sorted(_differences(_compared(before), _compared(now)))
    if differing:
        raise ConfigError(f"{output}: cannot resume, since settings have changed: {'; '.join(differing)}")
    if step >= recipe.steps and before["steps"] != recipe.steps:
        raise ConfigError(f"{output}: step {step} is reached already; steps={recipe.steps} would undo some")
    if before["steps"] != recipe.steps or before["schedule"] != now["schedule"]:
        stable = min(_stable_until(before), _stable_until(now))
        if step > stable:
            changed = f"steps was {before['steps']} and is {recipe.steps}; " if before["steps"] != recipe.steps else ""
            raise ConfigError(
                f"{output}: {changed}steps and decay can only change while the learning rate is stable, "
                f"until step {stable}, and the newest checkpoint is at {step}"
            )


def check_same_data(output: Path, summary: dict[str, Any], *, resuming: bool) -> None:
    """Write down what the corpus and other files amount to, or on a resume refuse others.

    Raises:
        ConfigError: The files or their tokens are not those that the run began with.
    """
    path = output / "data.json"
    texts, files = dict(summary), dict(summary.get(FILES, {}))
    texts.pop(FILES, None)
    if resuming:
        before = json.loads(path.read_text("utf-8")) if path.is_file() else None
        # Runs of earlier versions say nothing of files; and one may be new, of an objective that joins in later.
        known = {} if before is None else before.pop(FILES, {})
        changed = sorted(name for name in files.keys() & known.keys() if files[name] != known[name])
        if before != texts or changed:
            told = f": {', '.join(changed)}" if changed else ""
            raise ConfigError(f"{output}: cannot resume, since the files in data.folder have changed{told}")
        files = {**known, **files}
    write_whole(path, json.dumps({**texts, FILES: files} if files else texts))


def _compared(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key not in _FREE}
    kept["data"] = {k: v for k, v in kept["data"].items() if k not in _FREE_DATA}
    kept["schedule"] = {k: v for k, v in kept["schedule"].items() if not k.startswith("decay")}
    return kept


def _differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for index, (one, other) in enumerate(zip(before, now, strict=True)):
            yield from _differences(one, other, f"{where}.{_named(one, index)}")
    elif before != now:
        yield f"{where} was {_shortly(before)} and is {_shortly(now)}"


def _shortly(value: Any) -> str:
    """Return a setting as a message shows it: of a list of settings the names alone."""
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return ", ".join(_named(item, index) for index, item in enumerate(value))
    return json.dumps(value)


def _named(item: Any, index: int) -> str:
    """Return what a recipe calls an item of a list."""
    return str(item.get("kind") or item.get("name") or index) if isinstance(item, dict) else str(index)


def _stable_until(settings: dict[str, Any]) -> int:
    """Return the step up to which the learning rate does not depend on the number of steps.

    It does not during a warm-up either; but who resumes a falling schedule with other steps has mistaken them.
    """
    schedule = settings["schedule"]
    if schedule["name"] in ("cosine", "linear"):
        return 0
    return int(settings["steps"] - (schedule["decay_steps"] or 0))


def write_manifest(folder: Path) -> None:
    """Declare the checkpoint in ``folder`` whole."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            with path.open("rb") as file:
                # The sizes are only a promise once the contents are on the disk.
                os.fsync(file.fileno())
            files[path.relative_to(folder).as_posix()] = path.stat().st_size
    write_whole(folder / MANIFEST, json.dumps(files, indent=1))


def newest_checkpoint(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest whole checkpoint in ``folder``, and for each broken one what is wrong with it."""
    newest, broken = None, {}
    found = [path for path in folder.glob("checkpoint-*") if _NAME.match(path.name)]
    for path in sorted(found, key=step_of, reverse=True):
        problem = _problem(path)
        if problem is not None:
            broken[path] = problem
        elif newest is None:
            newest = path
    return newest, broken


def step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written.

    >>> step_of(Path("run/checkpoints/checkpoint-400"))
    400
    """
    return int(checkpoint.name.rsplit("-", 1)[1])


def _problem(folder: Path) -> str | None:
    try:
        files = json.loads((folder / MANIFEST).read_text("utf-8"))
    except FileNotFoundError:
        return "cut short before it was complete"
    except ValueError:
        return "its manifest is unreadable"
    if not isinstance(files, dict) or not files:
        return "its manifest is unreadable"
    for name, size in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes instead of {size}"
    return None
