"""Carries a recipe out: model, texts, training, and the finished folder.

Knows: the layout of a run's folder, and which process writes into it. Does not know: how a step is taken.

::

    OUTPUT/recipe.json      the settings, compared on resume
    OUTPUT/data.json        what the texts amount to, compared on resume
    OUTPUT/log.jsonl        one line a log or validation step
    OUTPUT/cache/           tokenizer and tokens, unless data.cache names another folder
    OUTPUT/checkpoints/     checkpoint-N, each whole only with its manifest
    OUTPUT/snapshots/       step-N, the model on its way, where snapshot_steps asks for it
    OUTPUT/tensorboard/     the log once more, where report_to asks for it
    OUTPUT/model/           the finished model; there only when training is done
"""

import errno
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from gerund.errors import GerundError, ResourceError
from gerund.jobs.files import make_folder, write_whole
from gerund.models.heads import ProjectionHead
from gerund.scoring.dual import ScorerSettings, write_scorer
from gerund.training.building import CorpusTexts, build_objectives
from gerund.training.checkpoints import newest_checkpoint, step_of
from gerund.training.compiling import compile_layers
from gerund.training.corpus.sources import Sources
from gerund.training.journal import Journal, announce
from gerund.training.objectives.base import Objective
from gerund.training.objectives.causal import BlockBatches
from gerund.training.objectives.rankgen import PassageBatches
from gerund.training.outputs import check_output, check_resumable, check_same_data, write_model
from gerund.training.recipe import Recipe
from gerund.training.recipe_objectives import RankgenConfig
from gerund.training.step import StepData, TrainingModule, process_count
from gerund.training.subject import Subject, check_machine, prepare_subject, uses_bf16
from gerund.training.trainer import GerundTrainer, is_sharded, trained_tensors, training_arguments

if TYPE_CHECKING:
    from torch import nn


def train(recipe: Recipe, *, resume: bool = False) -> Path:
    """Train and return the folder of the finished model.

    Started by ``torchrun`` or ``accelerate launch``, several processes share every batch; the first one writes.

    Args:
        recipe: The settings.
        resume: Go on from the newest whole checkpoint, or start where there is none.

    Raises:
        OutputExistsError: The output holds a finished model, or an unfinished run and ``resume`` is not set.
        ConfigError: The settings differ from those of the run to be resumed.
        GerundError: A loss is no finite number any more, or another process has ended.
    """
    try:
        return _train(recipe, resume)
    except RuntimeError as error:
        # What gloo and NCCL say in the processes that are left.
        if process_count() > 1 and re.search(r"by peer|remote process|ncclRemoteError|Broken pipe", str(error)):
            raise GerundError("another process of this training has ended; what it said tells why") from error
        raise


def _train(recipe: Recipe, resume: bool) -> Path:
    check_machine(recipe)
    output = recipe.output
    # Joins the processes, where there are several, before the first file is written.
    first = training_arguments(recipe, output / "checkpoints").process_index == 0
    check_output(output, resume)
    checkpoint, skipped = newest_checkpoint(output / "checkpoints")
    step = step_of(checkpoint) if checkpoint else 0
    if checkpoint is not None:
        check_resumable(recipe, output, step)
    _wait()  # nobody writes before everybody has looked
    make_folder(output)
    try:
        subject, objectives = _prepare(recipe, first, resuming=checkpoint is not None)
    except BaseException:
        with suppress(OSError):  # a mistake leaves no empty folder behind; one that holds something stays
            output.rmdir()
        raise
    if recipe.compile and not subject.is_encoder_decoder:
        compile_layers(subject.model)
    module = TrainingModule(
        subject.model, {objective.name: objective.losses for objective in objectives}, bf16=uses_bf16(recipe)
    )
    if first:
        # From here on the folder holds a run; what failed above was only a mistake.
        write_whole(output / "recipe.json", recipe.model_dump_json(indent=1))
    journal = Journal(output / "log.jsonl", step=step, steps=recipe.steps, silent=not first)
    _tell(journal, recipe, objectives, skipped, step)
    with _explained(output, journal):
        trainer = GerundTrainer(
            module,
            recipe,
            objectives=objectives,
            data=StepData(objectives, steps=recipe.steps, processes=process_count()),
            checkpoints=output / "checkpoints",
            journal=journal,
            snapshot=lambda at: _snapshot(recipe, subject, at, _beside(objectives)),
        )
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        losses = trainer.last_validation()
        head, subject = subject.head, _gathered(recipe, subject, module, first)
        # In every process: FSDP puts weights together only with all of them.
        beside, head = _beside(objectives), _whole_head(head)
        if first:
            report = _report(recipe, losses, journal, objectives, module)
            write_model(subject, output / "model", report, head=head, more=beside)
    _wait()
    return output / "model"


def _prepare(recipe: Recipe, first: bool, *, resuming: bool) -> tuple[Subject, list[Objective]]:
    """Return the model and its objectives; the first process tokenises, the others find the tokens there."""
    if not first:
        _wait()
    subject = prepare_subject(recipe)
    sources = Sources(recipe, subject.tokenizer, announce)
    objectives = build_objectives(recipe, subject, CorpusTexts(sources))
    if first:
        check_same_data(recipe.output, sources.summary(), resuming=resuming)
        _wait()
    return subject, objectives


def _wait() -> None:
    """Wait until all processes are here."""
    if process_count() > 1:
        distributed.barrier()


def _gathered(recipe: Recipe, subject: Subject, module: TrainingModule, first: bool) -> Subject:
    """Return the subject with whole weights: where FSDP has cut them, a new copy of it in the first process."""
    if not is_sharded(module):
        return subject
    trained = trained_tensors(module, keep=first)
    if not first:
        return subject
    copy = prepare_subject(recipe)
    with torch.no_grad():
        for name, parameter in copy.model.named_parameters():
            if parameter.requires_grad:
                parameter.copy_(trained[f"model.{name}"])
    return copy


def _tell(journal: Journal, recipe: Recipe, objectives: list[Objective], skipped: dict[Path, str], step: int) -> None:
    for path, problem in skipped.items():
        journal.note(f"removing {path.name}: {problem}")
        if not journal.silent:
            # It would be counted among the checkpoints to keep, and push a whole one out.
            shutil.rmtree(path)
    for objective in objectives:
        if objective.batches.skipped:
            journal.note(f"{objective.name}: {objective.batches.skipped} texts are too short and left out")
        available = objective.batches.available
        if available is not None and available < objective.config.batch_size:
            size = objective.config.batch_size
            journal.note(f"{objective.name}: only {available} texts for batches of {size}, which repeat them")
    names = ", ".join(objective.name for objective in objectives)
    journal.note(f"{'resuming' if step else 'starting'} at step {step} of {recipe.steps}: {names}")


def _snapshot(recipe: Recipe, subject: Subject, step: int, beside: Callable[[Path], None]) -> None:
    folder = recipe.output / "snapshots" / f"step-{step}"
    # What an interrupted run left there may come from a decay that the resumed one does not have.
    report = {"step": step, "recipe": _published(recipe)}
    write_model(subject, folder, report, head=_whole_head(subject.head), more=beside, overwrite=True)


def _beside(objectives: list[Objective]) -> Callable[[Path], None]:
    """Return what writes the files of a scorer beside the model, where one was trained."""
    for objective in objectives:
        config, batches, losses = objective.configs.get("rankgen"), objective.batches, objective.losses
        if not isinstance(batches, PassageBatches) or not isinstance(config, RankgenConfig):
            continue
        weight = getattr(getattr(losses, "projection", None), "weight", None)
        if weight is not None:
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            weight = weight.detach().float().cpu().numpy().copy()
        settings = ScorerSettings(
            prefix=config.prefix_marker,
            continuation=config.continuation_marker,
            prefix_tokens=config.length - batches.prefixes.room,
            continuation_tokens=config.continuation_length - batches.continuations.room,
            similarity=config.similarity,
        )
        return lambda folder: write_scorer(folder, settings, weight)
    return lambda _folder: None


def _whole_head(head: ProjectionHead | None) -> ProjectionHead | None:
    """Return a copy of the head as it is now, on the CPU."""
    if head is None:
        return None
    own = ProjectionHead(head.settings)
    state = head.state_dict()
    own.load_state_dict({name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()})
    return own.eval()


@contextmanager
def _explained(output: Path, journal: Journal) -> Iterator[None]:
    """Close the journal whatever happens, and turn an exhausted machine into a plain sentence."""
    try:
        yield
    except BaseException as error:
        newest, _ = newest_checkpoint(output / "checkpoints")
        if newest is None:
            journal.note("stopped before the first checkpoint")
        elif not isinstance(error, GerundError):
            journal.note(f"stopped; --resume goes on from step {step_of(newest)}")
        exhausted = _exhaustion(error)
        if exhausted is not None:
            raise exhausted from error
        raise
    finally:
        journal.close()


def _exhaustion(error: BaseException) -> ResourceError | None:
    """Return a plain sentence where memory or disk ran out; torch and safetensors have no type for it."""
    text = str(error)
    full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    # torch.save only says that the file is shorter than what was written into it.
    if full or "No space left" in text or "inline_container" in text:
        return ResourceError("the disk is full; whole checkpoints are kept, make room and go on with --resume")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return ResourceError(
            "memory ran out; set a smaller micro_batch_size for the objectives, or model.gradient_checkpointing: true"
        )
    return None


def _published(recipe: Recipe) -> dict[str, Any]:
    """Return the settings without folders, which say something about a machine and nothing about the model."""
    return recipe.model_dump(mode="json", exclude={"output": True, "data": {"folder", "cache"}})


def _report(
    recipe: Recipe, losses: dict[str, float], journal: Journal, objectives: list[Objective], module: "nn.Module"
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "steps": recipe.steps,
        "tokens": journal.tokens,
        "trained_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "validation_loss": {name.removeprefix("val_"): round(value, 4) for name, value in losses.items()},
        "seconds": round(journal.seconds, 1),
        "torch": torch.__version__,
        "recipe": _published(recipe),
    }
    for objective in objectives:
        if isinstance(objective.batches, BlockBatches):
            names = [s.name for s in recipe.data.sources if not (o := _sources(recipe)) or s.name in o]
            epochs = zip(names, objective.batches.epochs(), strict=True)
            report["epochs"] = {name: round(value, 3) for name, value in epochs}
    return report


def _sources(recipe: Recipe) -> list[str]:
    return next((objective.sources for objective in recipe.objectives if objective.kind == "causal"), [])
