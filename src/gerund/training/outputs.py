"""What a run leaves in its folder: checks before it starts, the finished model after.

Knows: which folder holds what, and how to write one so that it is there whole or not at all. Does not
know: how the model was trained.
"""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gerund.data.files import write_whole
from gerund.errors import ConfigError, OutputExistsError
from gerund.models.saving import atomic_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

    from gerund.training.recipe import Recipe

# These may differ between a run and its resumption: they do not change what a step computes.
_FREE = ("output", "steps", "compile", "log_steps", "eval_steps", "save_steps", "keep_checkpoints")


def check_output(output: Path, resume: bool) -> None:
    """Refuse a folder that holds a finished model, or an unfinished run that is not to be resumed."""
    if output.exists() and not output.is_dir():
        raise OutputExistsError(f"{output} is a file; an output is a folder")
    if (output / "model").exists():
        raise OutputExistsError(f"{output / 'model'} is there already; choose another output or remove it")
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
    before, now = json.loads(path.read_text("utf-8")), json.loads(recipe.model_dump_json())
    differing = sorted(_differences(_compared(before), _compared(now)))
    if differing:
        raise ConfigError(f"{output}: cannot resume, since these settings have changed: {', '.join(differing)}")
    if step >= recipe.steps and before["steps"] != recipe.steps:
        raise ConfigError(f"{output}: step {step} is reached already; steps={recipe.steps} would undo some")
    if before["steps"] != recipe.steps or before["schedule"] != now["schedule"]:
        stable = min(_stable_until(before), _stable_until(now))
        if step > stable:
            raise ConfigError(
                f"{output}: steps and decay can only change while the learning rate is stable, "
                f"until step {stable}, and the newest checkpoint is at {step}"
            )


def check_same_data(output: Path, summary: list[list[int]], *, resuming: bool) -> None:
    """Write down what the corpus amounts to, or on a resume refuse another corpus.

    Raises:
        ConfigError: The files or their tokens are not those that the run began with.
    """
    path = output / "data.json"
    if resuming and (not path.is_file() or json.loads(path.read_text("utf-8")) != summary):
        raise ConfigError(f"{output}: cannot resume, since the files in data.folder have changed")
    write_whole(path, json.dumps(summary))


def _compared(settings: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in settings.items() if key not in _FREE}
    kept["data"] = {k: v for k, v in kept["data"].items() if k not in ("folder", "cache", "validation_tokens")}
    kept["schedule"] = {k: v for k, v in kept["schedule"].items() if not k.startswith("decay")}
    return kept


def _differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from _differences(before.get(key), now.get(key), f"{where}.{key}" if where else key)
    elif before != now:
        yield where


def _stable_until(settings: dict[str, Any]) -> int:
    """Return the step up to which the learning rate does not depend on the number of steps."""
    schedule = settings["schedule"]
    if schedule["name"] == "cosine":
        return int(schedule["warmup_steps"])
    return int(settings["steps"] - (schedule["decay_steps"] or 0))


def write_model(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", folder: Path, report: dict[str, Any]
) -> Path:
    """Write the finished model as bf16 safetensors with its tokenizer and ``training.json``."""
    from transformers.utils import logging

    logging.disable_progress_bar()  # one shard of a few seconds; the journal has its own bar
    finished = copy.deepcopy(model).to("cpu", torch.bfloat16)
    with atomic_folder(folder) as partial:
        finished.save_pretrained(str(partial))
        tokenizer.save_pretrained(str(partial))
        write_whole(partial / "training.json", json.dumps(report, indent=1) + "\n")
        # safetensors writes files that only their owner can read; a model is there to be shared.
        for weights in partial.glob("*.safetensors"):
            weights.chmod((partial / "training.json").stat().st_mode)
    return folder
