"""Train by a recipe: prepare the model and its texts, run the steps, and write the finished model.

::

    OUTPUT/recipe.json      the settings, compared on resume
    OUTPUT/data.json        counts and hashes of texts and other files, compared on resume
    OUTPUT/log.jsonl        one line per log or validation step
    OUTPUT/fitted/          a distilling head before the first step, if it is fitted
    OUTPUT/cache/           tokenizer and tokens, unless data.cache names another folder
    OUTPUT/checkpoints/     checkpoint-N, each complete only with its manifest
    OUTPUT/snapshots/       step-N, the model during training, with snapshot_steps
    OUTPUT/tensorboard/     the log for TensorBoard, with report_to
    OUTPUT/model/           the finished model; exists only when training is done
"""

import copy
import errno
import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from gerund.entry import load
from gerund.errors import GerundError, ResourceError
from gerund.jobs.files import atomic_folder, lock_folder, write_atomic
from gerund.jobs.signals import interrupt_deferred
from gerund.language_model import LanguageModel, save_into
from gerund.models import loading
from gerund.models.adapters import ADAPTER_FILES, Adapters
from gerund.models.heads import ProjectionHead
from gerund.models.saved_settings import RECORD
from gerund.seq2seq_model import Seq2SeqModel
from gerund.training.corpus.texts import Sources
from gerund.training.objectives.base import Objective, prepare_objectives
from gerund.training.processes import (
    check_machine,
    check_shared_folder,
    compile_layers,
    has_bf16,
    on_first_process,
    once_per_node,
    preserve_random_states,
    process_count,
    process_index,
    uses_bf16,
    wait,
)
from gerund.training.recipe import Recipe
from gerund.training.run_folder import (
    TrainingLog,
    announce,
    check_output,
    check_resumable,
    check_same_data,
    newest_checkpoint,
    step_of,
)
from gerund.training.sharding import gather_trained, is_sharded, shard, spread, take, whole
from gerund.training.step import StepData, TrainingModule
from gerund.training.trainable_model import TrainableModel, prepare_model
from gerund.training.trainer import GerundTrainer, training_arguments


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
    if uses_bf16(recipe) and not has_bf16():
        announce("bf16 is emulated on this machine, many times slower than fp32, which precision=auto takes")
    output = recipe.output
    # Joins the processes, where there are several, before the first file is written.
    device = training_arguments(recipe, output / "checkpoints").device
    with ExitStack() as held:
        checkpoint, broken = on_first_process(lambda: _claim_folder(recipe, resume, held))
        check_shared_folder(output)
        with preserve_random_states():
            return _train_from(recipe, checkpoint, broken, device)


def _claim_folder(recipe: Recipe, resume: bool, held: ExitStack) -> tuple[Path | None, dict[Path, str]]:
    """Lock the output folder for all processes; return the checkpoint to go on from, and what is wrong with others."""
    output = recipe.output
    check_output(output, resume)
    held.enter_context(lock_folder(output))
    # Once more: another training may have ended in between.
    check_output(output, resume)
    checkpoint, broken = newest_checkpoint(output / "checkpoints")
    if checkpoint is not None:
        check_resumable(recipe, output, step_of(checkpoint))
    return checkpoint, broken


def _train_from(recipe: Recipe, checkpoint: Path | None, broken: dict[Path, str], device: torch.device) -> Path:
    output, step, first = recipe.output, step_of(checkpoint) if checkpoint else 0, process_index() == 0
    model, objectives = _prepare(recipe, resuming=checkpoint is not None)
    if recipe.compile and not model.is_encoder_decoder:
        compile_layers(model.model)
    module = TrainingModule(
        model.model, {objective.name: objective.losses for objective in objectives}, bf16=uses_bf16(recipe)
    )
    _start(recipe, model, module, device)
    if first:
        # From here on the folder holds a run; what failed above was only a mistake.
        write_atomic(output / "recipe.json", json.dumps(recipe.plain(), indent=1))
    log = TrainingLog(output / "log.jsonl", step=step, steps=recipe.steps, silent=not first)
    _announce(log, recipe, objectives, broken, step)
    with _explained(output, log):
        with _deferred_interrupt() as is_to_end:
            trainer = GerundTrainer(
                module,
                recipe,
                objectives=objectives,
                data=StepData(objectives, steps=recipe.steps, processes=process_count()),
                checkpoints=output / "checkpoints",
                log=log,
                snapshot=lambda at: _snapshot(recipe, model, at, objectives),
                is_to_end=is_to_end,
            )
            trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        losses = trainer.last_validation()
        finished = _gathered(recipe, model, module)
        # In every process: shards are put together only with all of them.
        beside = _beside(recipe, model, objectives)
        if first:
            report = _report(recipe, losses, log, objectives, module)
            write_model(finished, output / "model", report, is_copy=finished is not model, **beside)
    wait()
    return output / "model"


def _prepare(recipe: Recipe, *, resuming: bool) -> tuple[TrainableModel, list[Objective]]:
    """Return the model and its objectives.

    The first process alone reads weights, and one a node tokenises; the others find the tokens there.
    """
    first = process_index() == 0
    with once_per_node():
        model = prepare_model(recipe, weights=first)
        sources = Sources(recipe, model.tokenizer, announce)
        objectives = prepare_objectives(recipe, model, sources, resuming=resuming)
        if first:
            check_same_data(recipe.output, sources.summary(), resuming=resuming)
    return model, objectives


def _start(recipe: Recipe, model: TrainableModel, module: TrainingModule, device: torch.device) -> None:
    """Give all processes the weights of the first: whole, or cut into shards."""
    if process_count() == 1:
        return
    if recipe.sharding == "none":
        spread(module, device)
        return
    plans = [plan for objective in recipe.objectives for plan in objective.plans(model.encoder)]
    streams = [plan.resolve(model.n_layers).stream for plan in plans if not model.is_encoder_decoder]
    # A stream of its own goes on with states that are no layer's output, so nothing tells when they need the weights.
    stacked = any(stream is not None and stream.kind == "stack" for stream in streams)
    shard(module, model.layers, device, gather_again=not stacked)


def _gathered(recipe: Recipe, model: TrainableModel, module: TrainingModule) -> TrainableModel:
    """Return the model with whole weights: where they are in shards, a new copy of it in the first process."""
    if not is_sharded(module):
        return model
    first = process_index() == 0
    trained = gather_trained(module, keep=first)
    if not first:
        return model
    # The frozen weights under an adapter stay a skeleton: they are copied from where they came.
    copy = prepare_model(recipe, weights=False)
    weights = {name.removeprefix("model."): tensor for name, tensor in trained.items() if name.startswith("model.")}
    take(copy.model, weights, dict(model.model.named_buffers()))
    return copy


def _announce(
    log: TrainingLog, recipe: Recipe, objectives: list[Objective], broken: dict[Path, str], step: int
) -> None:
    for path, problem in broken.items():
        log.note(f"removing {path.name}: {problem}")
        if not log.silent:
            # It would be counted among the checkpoints to keep, and push a whole one out.
            shutil.rmtree(path)
    for objective in objectives:
        if objective.batches.skipped:
            log.note(f"{objective.name}: {objective.batches.skipped} texts are too short and left out")
        available = objective.batches.available
        if available is not None and available < objective.config.batch_size:
            size = objective.config.batch_size
            log.note(f"{objective.name}: only {available} texts for batches of {size}, which repeat them")
    names = ", ".join(objective.name for objective in objectives)
    log.note(f"{'resuming' if step else 'starting'} at step {step} of {recipe.steps}: {names}")


def _snapshot(recipe: Recipe, model: TrainableModel, step: int, objectives: list[Objective]) -> None:
    folder = recipe.output / "snapshots" / f"step-{step}"
    report = {"step": step, "recipe": recipe.published()}
    # What an interrupted run left there may come from a decay that the resumed one does not have.
    write_model(model, folder, report, overwrite=True, **_beside(recipe, model, objectives))


def _beside(recipe: Recipe, model: TrainableModel, objectives: list[Objective]) -> dict[str, Any]:
    """Return what is written beside the model, as ``write_model`` takes it, with weights as they are now."""
    return {
        "head": gathered_head(model.head),
        "extra_files": [write for objective in objectives for write in objective.extra_files()],
        "reranks": recipe.model.base if any(one.trains_reranker for one in recipe.objectives) else None,
    }


def _deferred_interrupt() -> AbstractContextManager[Callable[[], bool]]:
    """Return what puts an interruption off to the end of a step, and tells that there was one."""
    if process_count() > 1:
        # Signals reach processes at different steps, while a checkpoint takes all of them at the same one.
        return nullcontext(lambda: False)
    return interrupt_deferred("gerund: ending after this step, with a checkpoint; once more ends at once")


@contextmanager
def _explained(output: Path, log: TrainingLog) -> Iterator[None]:
    """Close the log whatever happens, and turn an exhausted machine into a plain sentence."""
    try:
        yield
    except BaseException as error:
        newest, _ = newest_checkpoint(output / "checkpoints")
        hint = newest and f"step {step_of(newest)} is kept in {output}: give --resume to go on from there"
        if isinstance(error, KeyboardInterrupt):
            restart = f"there was no checkpoint yet, so nothing is kept; give --resume to begin again in {output}"
            error.add_note(hint or restart)
        elif hint is None:
            log.note("stopped before the first checkpoint")
        elif not isinstance(error, GerundError):
            log.note(f"stopped; {hint}")
        exhausted = _exhaustion(error)
        if exhausted is not None:
            raise exhausted from error
        raise
    finally:
        log.close()


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


def _report(
    recipe: Recipe, losses: dict[str, float], log: TrainingLog, objectives: list[Objective], module: nn.Module
) -> dict[str, Any]:
    report: dict[str, Any] = {
        "steps": recipe.steps,
        "tokens": log.tokens,
        "trained_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "validation_loss": {name.removeprefix("val_"): round(value, 4) for name, value in losses.items()},
        "seconds": round(log.seconds, 1),
        "torch": torch.__version__,
        "recipe": recipe.published(),
    }
    for objective in objectives:
        report |= objective.report()
    return report


def write_model(
    trained: TrainableModel,
    folder: Path,
    report: dict[str, Any],
    *,
    head: ProjectionHead | None = None,
    extra_files: Sequence[Callable[[Path], None]] = (),
    overwrite: bool = False,
    is_copy: bool = False,
    reranks: str | None = None,
) -> Path:
    """Write the finished model with its tokenizer, ``gerund.json`` and ``training.json``, and ``extra_files``.

    Weights are written in the type of the base's checkpoint, bf16 for a model from scratch. Where an adapter was
    trained, the base is read once more from where it came, so that its weights are the untouched ones, and the
    adapter lies in a folder of its own: generating does not use it. What ``is_copy`` is nobody's but this call's. A
    reranker is added to the base ``reranks`` as that is, with its own adapters.
    """
    # Loading the base samples random numbers, and a snapshot must not change the dropout of the steps after it.
    with torch.random.fork_rng(devices=[]), atomic_folder(folder, overwrite=overwrite) as partial:
        # Before the card, which names it.
        record = "training.json" if reranks is None else "training-rerank.json"
        write_atomic(partial / record, json.dumps(report, indent=1) + "\n")
        if trained.adapter is None:
            finished = trained.model if is_copy else copy.deepcopy(trained.model)
            finished = finished.to("cpu", _stored_type(trained))
            kind = Seq2SeqModel if trained.is_encoder_decoder else LanguageModel
            finished_lm = kind(finished, trained.tokenizer, trained.encoder, name=folder.name, head=head)
            if trained.answers is not None:
                finished_lm.take_answers(copy.deepcopy(trained.answers).cpu())
            save_into(finished_lm, partial, source=trained.source)
        elif reranks is not None:
            with TemporaryDirectory(dir=partial.parent) as room:
                write_adapter(trained, Path(room))
                for write in extra_files:
                    write(Path(room))
                stored: Any = str(_stored_type(trained)).removeprefix("torch.")
                lm = load(reranks, reranker=room, dtype=stored, device="cpu", runtime="torch")
                save_into(lm, partial, source=trained.source)
            # Of how the base was trained, which says what its adapters are for.
            settings = None if trained.source is None else loading.settings_folder(trained.source)
            if settings is not None and (settings / RECORD).is_file():
                shutil.copyfile(settings / RECORD, partial / RECORD)
            extra_files = ()
        else:
            assert trained.source is not None
            base, tokenizer = loading.read(trained.source, None)
            with TemporaryDirectory(dir=partial.parent) as room:
                write_adapter(trained, Path(room))
                options: dict[str, Any] = {"name": folder.name, "adapters": Adapters.shared(Path(room)), "head": head}
                save_into(LanguageModel(base, tokenizer, trained.encoder, **options), partial, source=trained.source)
        for write in extra_files:
            write(partial)
    return folder


def write_adapter(trained: TrainableModel, folder: Path) -> None:
    """Write the adapter as PEFT does, in the type of the base's checkpoint and without its place on this machine."""
    assert trained.adapter is not None
    assert trained.source is not None
    config = trained.adapter.peft_config["default"]
    config.base_model_name_or_path = Path(trained.source.name).name if trained.source.folder else trained.source.name
    training, config.inference_mode = config.inference_mode, True
    try:
        # "auto" would ask the hub whether the base's vocabulary has grown.
        trained.adapter.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    finally:
        config.inference_mode = training
    (folder / "README.md").unlink(missing_ok=True)  # an empty form
    weights, stored_type = folder / ADAPTER_FILES[1], _stored_type(trained)
    save_file({key: part.to(stored_type) for key, part in load_file(weights).items()}, weights, {"format": "pt"})


def _stored_type(trained: TrainableModel) -> torch.dtype:
    stored = None if trained.source is None else loading.dtype_of(loading.read_config(trained.source))
    return stored or torch.bfloat16


def gathered_head(head: ProjectionHead | None) -> ProjectionHead | None:
    """Return a copy of the head as it is now, on the CPU."""
    if head is None:
        return None
    copied = ProjectionHead(head.settings)
    state = head.state_dict()
    copied.load_state_dict({name: whole(tensor) for name, tensor in state.items()})
    return copied.eval()
