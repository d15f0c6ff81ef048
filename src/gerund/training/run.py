"""Carries a recipe out: tokenizer, tokens, model, training, and the finished folder.

Knows: the layout of a run's folder. Does not know: how a step is taken (``trainer.py``).

::

    OUTPUT/recipe.json      the settings, compared on resume
    OUTPUT/log.jsonl        one line a log or validation step
    OUTPUT/cache/           tokenizer and tokens, unless data.cache names another folder
    OUTPUT/checkpoints/     checkpoint-N, each whole only with its manifest
    OUTPUT/model/           the finished model; there only when training is done
"""

import errno
import hashlib
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils.data import ConcatDataset

from gerund.data.corpus import clean_text, read_documents
from gerund.data.files import write_whole
from gerund.errors import ConfigError, ResourceError, unknown_name
from gerund.models.saving import atomic_folder
from gerund.training.checkpoints import newest_checkpoint, step_of
from gerund.training.journal import Journal
from gerund.training.optimizer import build_optimizer
from gerund.training.outputs import (
    check_output,
    check_resumable,
    check_same_data,
    write_model,
)
from gerund.training.packing import (
    PackedBlocks,
    TokenCache,
    tokenize_corpus,
    validation_blocks,
)
from gerund.training.recipe import Recipe, SourceConfig
from gerund.training.tokenizer import load_tokenizer, train_tokenizer
from gerund.training.trainer import GerundTrainer, TrainingModule

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerFast


@dataclass(frozen=True)
class Estimate:
    """What ``--dry-run`` finds out."""

    parameters: int
    """Trainable parameters."""
    tokens_per_step: int
    """Tokens of an optimizer step."""
    tokens: int
    """Tokens of the whole training."""
    seconds_per_step: float
    """Mean of two real steps."""
    seconds: float
    """Estimated time of all steps."""


def train(recipe: Recipe, *, resume: bool = False) -> Path:
    """Train and return the folder of the finished model.

    Args:
        recipe: The settings.
        resume: Go on from the newest whole checkpoint, or start where there is none.

    Raises:
        OutputExistsError: The output holds a finished model, or an unfinished run and ``resume`` is not set.
        ConfigError: The settings differ from those of the run to be resumed.
    """
    _check_machine(recipe)
    output = recipe.output
    check_output(output, resume)
    checkpoint, skipped = newest_checkpoint(output / "checkpoints")
    step = step_of(checkpoint) if checkpoint else 0
    if checkpoint is not None:
        check_resumable(recipe, output, step)
    check_architecture(recipe)
    output.mkdir(parents=True, exist_ok=True)
    tokenizer = prepare_tokenizer(recipe)
    caches = [_tokens(recipe, source, source.files, tokenizer) for source in recipe.data.sources]
    check_same_data(output, [cache.summary() for cache in caches], resuming=checkpoint is not None)
    phases, validation = _training_blocks(recipe, caches), _validation(recipe, tokenizer)
    module = TrainingModule(build_model(recipe, tokenizer), bf16=uses_bf16(recipe), compiled=recipe.compile)

    # From here on the folder holds a run; what failed above was only a mistake.
    write_whole(output / "recipe.json", recipe.model_dump_json(indent=1))
    journal = Journal(output / "log.jsonl", step=step, steps=recipe.steps, tokens_per_step=recipe.data.batch_tokens)
    for path, problem in skipped.items():
        journal.note(f"removing {path.name}: {problem}")
        # It would be counted among the checkpoints to keep, and push a whole one out.
        shutil.rmtree(path)
    journal.note(f"{'resuming' if checkpoint else 'starting'} at step {step} of {recipe.steps}")
    try:
        trainer = GerundTrainer(
            module,
            recipe,
            data=ConcatDataset(phases),
            validation=validation,
            checkpoints=output / "checkpoints",
            journal=journal,
        )
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        losses = trainer.last_validation()
    except BaseException as error:
        if (output / "checkpoints").is_dir():
            journal.note("stopped; --resume goes on from the newest checkpoint")
        exhausted = _exhaustion(error)
        if exhausted is not None:
            raise exhausted from error
        raise
    finally:
        journal.close()
    return write_model(module.model, tokenizer, output / "model", _report(recipe, losses, journal, phases))


def estimate(recipe: Recipe) -> Estimate:
    """Time two real steps on random tokens; reads no data and writes nothing."""
    _check_machine(recipe)
    check_architecture(recipe)
    for source in recipe.data.sources:
        _existing(recipe, source.files + source.validation)
    size = recipe.tokenizer.vocab_size
    tokenizer = load_tokenizer(recipe.tokenizer.path) if recipe.tokenizer.path else None
    model = build_model(recipe, tokenizer)
    module = TrainingModule(model, bf16=uses_bf16(recipe), compiled=recipe.compile)
    module.to("cuda" if torch.cuda.is_available() else "cpu")
    optimizer = build_optimizer(module, recipe.optimizer)
    shape = (recipe.rows, recipe.data.sequence_length)
    ids = torch.randint(size if tokenizer is None else len(tokenizer), shape, device=model.device)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        for _ in range(recipe.accumulation):
            total, count = module(ids)
            (total / count).backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    # The first step compiles and allocates; it is counted once and not averaged in.
    per_step = sum(times[1:]) / 2
    return Estimate(
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        tokens_per_step=recipe.data.batch_tokens,
        tokens=recipe.steps * recipe.data.batch_tokens,
        seconds_per_step=per_step,
        seconds=times[0] + per_step * (recipe.steps - 1),
    )


def uses_bf16(recipe: Recipe) -> bool:
    """Return whether the forward pass runs in bf16."""
    if recipe.precision != "auto":
        return recipe.precision == "bf16"
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported()
    native = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return bool(native and native())


def check_architecture(recipe: Recipe) -> None:
    """Refuse an unknown architecture, or a field that it does not have; transformers would ignore it.

    Raises:
        ConfigError: With the valid names.
    """
    from transformers import CONFIG_MAPPING

    kind = recipe.model.config.get("model_type")
    if kind is None:
        raise ConfigError("model.config has no model_type; 'llama' is one")
    if kind not in CONFIG_MAPPING:
        raise ConfigError(f"model.config.model_type {kind!r} is unknown to transformers; 'llama' is one it knows")
    known = CONFIG_MAPPING[kind]().to_dict().keys() | {"rope_theta"}
    for name in recipe.model.config:
        if name not in known:
            raise unknown_name("field of model.config", name, sorted(known))


def build_model(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast | None") -> "PreTrainedModel":
    """Return a freshly initialised model; the same seed gives the same weights.

    Raises:
        ConfigError: The architecture's fields do not fit together.
    """
    from transformers import AutoConfig, AutoModelForCausalLM, set_seed

    vocabulary: dict[str, Any] = {"vocab_size": recipe.tokenizer.vocab_size}
    if tokenizer is not None:
        ids = {key: getattr(tokenizer, key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        vocabulary = {"vocab_size": len(tokenizer), **ids}
    set_seed(recipe.seed)
    try:
        config = AutoConfig.for_model(**{**recipe.model.config, **vocabulary})
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (ValueError, TypeError, RuntimeError, StrictDataclassError) as error:
        raise ConfigError(f"model.config makes no model: {' '.join(str(error).split())}") from error


def prepare_tokenizer(recipe: Recipe) -> "PreTrainedTokenizerFast":
    """Open the recipe's tokenizer, or train it, or take the one trained on the same data before."""
    settings = recipe.tokenizer
    if settings.path is not None:
        return load_tokenizer(settings.path)
    sources = [(s.clean, s.weight, s.text_column, _stamps(recipe, s.files)) for s in recipe.data.sources]
    content = [1, settings.vocab_size, settings.sample_mb, settings.max_length, sources]
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]
    folder = _cache(recipe) / f"tokenizer-{key}"
    if not folder.is_dir():
        tokenizer = train_tokenizer(_sample(recipe), vocab_size=settings.vocab_size, max_length=settings.max_length)
        with atomic_folder(folder) as partial:
            tokenizer.save_pretrained(str(partial))
    # Read back also when just trained, so that the first run and a resumed one use the very same object.
    return load_tokenizer(folder)


def _sample(recipe: Recipe) -> "Iterator[str]":
    total = sum(source.weight for source in recipe.data.sources)
    for source in recipe.data.sources:
        budget = recipe.tokenizer.sample_mb * 1e6 * source.weight / total
        for document in read_documents(_existing(recipe, source.files), text_column=source.text_column):
            text = clean_text(document.text, source.clean)
            yield text
            budget -= len(text.encode("utf-8"))
            if budget <= 0:
                break


def _training_blocks(recipe: Recipe, caches: list[TokenCache]) -> list[PackedBlocks]:
    """Return the micro-batches of the stable phase, and those of the decay if its blocks are longer."""
    schedule, length = recipe.schedule, recipe.data.sequence_length
    decay = (schedule.decay_steps or 0) if schedule.decay_sequence_length else 0
    phases = [(recipe.steps - decay, length, recipe.seed)]
    if decay:
        # A seed of its own, or the long blocks would begin where the first short ones began.
        phases.append((decay, schedule.decay_sequence_length or length, recipe.seed + 1))
    return [
        PackedBlocks(
            caches,
            [source.weight for source in recipe.data.sources],
            length=length,
            rows=recipe.rows * recipe.data.sequence_length // length,
            items=steps * recipe.accumulation,
            seed=seed,
        )
        for steps, length, seed in phases
    ]


def _validation(recipe: Recipe, tokenizer: "PreTrainedTokenizerFast") -> dict[str, list[dict[str, torch.Tensor]]]:
    return {
        source.name: validation_blocks(
            _tokens(recipe, source, source.validation, tokenizer),
            length=recipe.data.sequence_length,
            rows=recipe.rows,
            limit=recipe.data.validation_tokens,
        )
        for source in recipe.data.sources
        if source.validation
    }


def _tokens(
    recipe: Recipe, source: SourceConfig, files: list[Path], tokenizer: "PreTrainedTokenizerFast"
) -> TokenCache:
    paths = _existing(recipe, files)
    return tokenize_corpus(paths, tokenizer, _cache(recipe), clean=source.clean, text_column=source.text_column)


def _cache(recipe: Recipe) -> Path:
    return recipe.data.cache or recipe.output / "cache"


def _existing(recipe: Recipe, files: list[Path]) -> list[Path]:
    paths = [recipe.data.folder / file for file in files]
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"{path}: no such file; data.folder is {str(recipe.data.folder)!r}")
    return paths


def _stamps(recipe: Recipe, files: list[Path]) -> list[tuple[str, int]]:
    return [(path.name, path.stat().st_size) for path in _existing(recipe, files)]


def _check_machine(recipe: Recipe) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # The order of micro-batches over several processes is not settled yet; wrong data would go unnoticed.
        raise ConfigError("training runs in one process; start it without torchrun")
    compilers = (os.environ.get("CXX"), "c++", "g++", "clang++")
    if recipe.compile and not any(name and shutil.which(name) for name in compilers):
        raise ConfigError("compile=true needs a C++ compiler and there is none; install one or set compile=false")


def _exhaustion(error: BaseException) -> ResourceError | None:
    """Return a plain sentence where memory or disk ran out; torch and safetensors have no type for it."""
    text = str(error)
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if full or "No space left" in text:
        return ResourceError("the disk is full; whole checkpoints are kept, make room and go on with --resume")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text:
        return ResourceError("memory ran out; lower data.micro_batch_tokens in a new output folder")
    return None


def _report(recipe: Recipe, losses: dict[str, float], journal: Journal, phases: list[PackedBlocks]) -> dict[str, Any]:
    names = [source.name for source in recipe.data.sources]
    epochs = zip(*(phase.epochs() for phase in phases), strict=True)
    return {
        "steps": recipe.steps,
        "tokens": recipe.steps * recipe.data.batch_tokens,
        "epochs": {name: round(sum(parts), 3) for name, parts in zip(names, epochs, strict=True)},
        "validation_loss": {name.removeprefix("val_"): round(value, 4) for name, value in losses.items()},
        "seconds": round(journal.seconds, 1),
        "torch": torch.__version__,
        # Folders say something about a machine and nothing about the model.
        "recipe": recipe.model_dump(mode="json", exclude={"output": True, "data": {"folder", "cache"}}),
    }
