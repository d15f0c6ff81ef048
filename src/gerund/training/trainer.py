"""transformers' ``Trainer``, taught to run our objectives: sums and counts in, whole checkpoints out.

Knows: how a micro-batch becomes a gradient, what is saved when. Does not know: files, recipes' folders,
tokenizers. The Trainer's own loop, optimizer states, random states and accumulation are used as they are.
"""

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from gerund.errors import GerundError
from gerund.training.checkpoints import write_manifest
from gerund.training.objectives.causal import causal_count, causal_loss
from gerund.training.optimizer import build_optimizer, learning_rate_factor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gerund.training.journal import Journal
    from gerund.training.recipe import Recipe

WEIGHTS = "trainable.safetensors"


class TrainingModule(nn.Module):
    """The language model together with what it is trained for; called once a micro-batch.

    The loss is computed inside and only scalars leave, so that no wrapper around the module copies the
    logits. Weights stay fp32; ``bf16`` runs the forward pass under autocast.

    Args:
        model: The language model.
        bf16: Whether to autocast.
        compiled: Whether to compile the loss.
    """

    # Tells the Trainer that the division by the number of tokens is ours.
    accepts_loss_kwargs = False

    def __init__(self, model: "PreTrainedModel", *, bf16: bool = False, compiled: bool = False) -> None:
        super().__init__()
        self.model = model
        self.bf16 = bf16
        # Static shapes: there are two or three of them (validation, long blocks), each worth its own kernels.
        self._loss = torch.compile(causal_loss, dynamic=False) if compiled else causal_loss

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the summed loss and the number of tokens it sums over."""
        autocast: AbstractContextManager = nullcontext()
        if self.bf16:
            autocast = torch.autocast(input_ids.device.type, torch.bfloat16)
        with autocast:
            return self._loss(self.model, input_ids), causal_count(input_ids)


class GerundTrainer(Trainer):
    """Runs a recipe on a :class:`TrainingModule`.

    Args:
        module: What is trained.
        recipe: The settings.
        data: The micro-batches in their order.
        validation: For each source's name its validation micro-batches.
        checkpoints: Folder for checkpoints.
        journal: Where losses are written down.
    """

    def __init__(
        self,
        module: TrainingModule,
        recipe: "Recipe",
        *,
        data: Dataset,
        validation: dict[str, list[dict[str, torch.Tensor]]],
        checkpoints: Path,
        journal: "Journal",
    ) -> None:
        self.recipe, self.validation, self.journal = recipe, validation, journal
        self.optimizer: torch.optim.Optimizer | None
        self.lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None
        super().__init__(
            model=module,
            args=_arguments(recipe, checkpoints),
            train_dataset=data,
            eval_dataset=next(iter(validation.values()), None),
            data_collator=_only_item,
            callbacks=[_Bookkeeping(journal)],
        )
        self.loss_is_scaled_for_ga = True
        self._validated: tuple[int, dict[str, float]] = (-1, {})
        self.remove_callback(PrinterCallback)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Return the recipe's optimizer."""
        if self.optimizer is None:
            self.optimizer = build_optimizer(model or self.model, self.recipe.optimizer)
        return self.optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """Return the recipe's schedule."""
        if self.lr_scheduler is None:
            factor = learning_rate_factor(self.recipe.schedule, num_training_steps)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.create_optimizer(), factor)
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> tuple[list, torch.Tensor | int | None]:
        """Collect the micro-batches of a step and count what their losses sum over."""
        batches, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        return batches, sum(causal_count(batch["input_ids"]) for batch in batches)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> Any:
        """Return this micro-batch's share of the step's mean loss."""
        total, count = model(**inputs)
        loss = total / (num_items_in_batch or count)
        return (loss, {}) if return_outputs else loss

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return and log the mean loss per token of each source's validation blocks."""
        values = validation_losses(self.model, self.validation, self.args.device)
        if values:
            self.journal.write(self.state.global_step, values)
        self._validated = (self.state.global_step, values)
        return values

    def last_validation(self) -> dict[str, float]:
        """Return the validation losses of the weights as they are now."""
        step, values = self._validated
        return values if step == self.state.global_step else self.evaluate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write losses down, and stop when they are no numbers any more."""
        super().log(logs, start_time)
        if "loss" in logs:
            if not math.isfinite(logs["loss"]):
                raise GerundError(
                    f"the loss is {logs['loss']} at step {self.state.global_step}; lower optimizer.learning_rate"
                )
            kept: dict[str, float] = {key: logs[key] for key in ("loss", "learning_rate", "grad_norm") if key in logs}
            self.journal.write(self.state.global_step, kept)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        # The Trainer's own way fails on tied embeddings inside a wrapper and pickles its arguments.
        del state_dict
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: p.detach().contiguous() for name, p in self.model.named_parameters() if p.requires_grad}
        save_file(tensors, folder / WEIGHTS)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        load_weights(model or self.model, Path(resume_from_checkpoint))


def load_weights(module: nn.Module, checkpoint: Path) -> None:
    """Load a checkpoint's weights into ``module``, which must be trainable in exactly these parameters."""
    tensors = load_file(checkpoint / WEIGHTS)
    trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if tensors.keys() != trainable.keys():
        differing = sorted(tensors.keys() ^ trainable.keys())[:3]
        raise GerundError(f"{checkpoint}: its weights are those of another model (for example {', '.join(differing)})")
    with torch.no_grad():
        for name, parameter in trainable.items():
            parameter.copy_(tensors[name])


def validation_losses(
    module: nn.Module, validation: dict[str, list[dict[str, torch.Tensor]]], device: torch.device
) -> dict[str, float]:
    """Return ``{"val_NAME": mean loss per token}`` over each list of micro-batches."""
    module.eval()
    values = {}
    with torch.no_grad():
        for name, batches in validation.items():
            results = [module(batch["input_ids"].to(device)) for batch in batches]
            values[f"val_{name}"] = sum(float(total) for total, _ in results) / sum(count for _, count in results)
    module.train()
    return values


class _Bookkeeping(TrainerCallback):
    """Clocks the steps, and declares a checkpoint whole once everything is in it."""

    def __init__(self, journal: "Journal") -> None:
        self.journal = journal

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.journal.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, control
        self.journal.step_ends(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        del args, state
        # The Trainer looks at these once more after the last step, and would overwrite a whole checkpoint.
        control.should_evaluate = control.should_save = False

    def on_save(self, args: TrainingArguments, state: Any, control: Any, **_: Any) -> None:
        del control
        write_manifest(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _only_item(items: list[Any]) -> Any:
    """Collate nothing: an item of the data set is a whole micro-batch already."""
    return items[0]


def _arguments(recipe: "Recipe", checkpoints: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=recipe.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=recipe.accumulation,
        max_grad_norm=recipe.optimizer.max_grad_norm,
        logging_steps=recipe.log_steps,
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=recipe.eval_steps,
        save_strategy="steps",
        save_steps=recipe.save_steps,
        save_total_limit=recipe.keep_checkpoints,
        train_sampling_strategy="sequential",
        remove_unused_columns=False,
        label_names=["labels"],
        seed=recipe.seed,
        use_cpu=not torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to="none",
        disable_tqdm=True,
    )
