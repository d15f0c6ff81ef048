"""What a run leaves in its folder: checks before it starts, the finished model after.

Knows: which folder holds what, and how to write one so that it is there whole or not at all. Does not
know: how the model was trained.
"""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from gerund.errors import ConfigError, OutputExistsError
from gerund.jobs.files import write_whole
from gerund.jobs.folders import atomic_folder
from gerund.language_model import LanguageModel
from gerund.models import loading
from gerund.models.adapters import ADAPTER_FILES
from gerund.models.heads import ProjectionHead
from gerund.models.job_adapters import Adapters
from gerund.seq2seq_model import Seq2SeqModel

if TYPE_CHECKING:
    from gerund.training.recipe import Recipe
    from gerund.training.subject import Subject

# These may differ between a run and its resumption: they do not change what a step computes.
_FREE = (
    "output", "steps", "compile", "log_steps", "eval_steps", "save_steps", "keep_checkpoints", "snapshot_steps",
    "report_to",
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
    before, now = json.loads(path.read_text("utf-8")), json.loads(recipe.model_dump_json())
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


def check_same_data(output: Path, summary: dict[str, list[int]], *, resuming: bool) -> None:
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
        yield f"{where} was {json.dumps(before)} and is {json.dumps(now)}"


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


def write_model(
    subject: "Subject",
    folder: Path,
    report: dict[str, Any],
    *,
    head: ProjectionHead | None = None,
    more: Callable[[Path], None] = lambda _folder: None,
    overwrite: bool = False,
) -> Path:
    """Write the finished model with its tokenizer, ``gerund.json`` and ``training.json``, and what ``more`` writes.

    Weights are written in the type of the base's checkpoint, bf16 for a model from scratch. Where an adapter was
    trained, the base is read once more from where it came, so that its weights are the untouched ones, and the
    adapter lies in a folder of its own: generating does not use it.
    """
    # Loading the base draws random numbers, and a snapshot must not change the dropout of the steps after it.
    with torch.random.fork_rng(devices=[]), atomic_folder(folder, overwrite=overwrite) as partial:
        if subject.adapter is None:
            finished = copy.deepcopy(subject.model).to("cpu", _stored_type(subject))
            kind = Seq2SeqModel if subject.is_encoder_decoder else LanguageModel
            kind(finished, subject.tokenizer, subject.encoder, name=folder.name, head=head).save_into(partial)
        else:
            assert subject.source is not None
            base, tokenizer = loading.read(subject.source, None)
            with TemporaryDirectory(dir=partial.parent) as room:
                write_adapter(subject, Path(room))
                options: dict[str, Any] = {"name": folder.name, "adapters": Adapters.shared(Path(room)), "head": head}
                LanguageModel(base, tokenizer, subject.encoder, **options).save_into(partial)
        more(partial)
        write_whole(partial / "training.json", json.dumps(report, indent=1) + "\n")
    return folder


def write_adapter(subject: "Subject", folder: Path) -> None:
    """Write the adapter as PEFT does, in the type of the base's checkpoint and without its place on this machine."""
    assert subject.adapter is not None
    assert subject.source is not None
    config = subject.adapter.peft_config["default"]
    config.base_model_name_or_path = Path(subject.source.name).name if subject.source.folder else subject.source.name
    training, config.inference_mode = config.inference_mode, True
    try:
        # "auto" would ask the hub whether the base's vocabulary has grown.
        subject.adapter.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    finally:
        config.inference_mode = training
    (folder / "README.md").unlink(missing_ok=True)  # an empty form
    weights, stored_type = folder / ADAPTER_FILES[1], _stored_type(subject)
    save_file({key: part.to(stored_type) for key, part in load_file(weights).items()}, weights, {"format": "pt"})


def _stored_type(subject: "Subject") -> torch.dtype:
    stored = None if subject.source is None else loading.stored_dtype(subject.source)
    return stored or torch.bfloat16
