"""``transformers.Trainer`` for gerund's objectives: whole or sharded checkpoints, exact resume, non-finite checks.

The Trainer's loop, optimizer states, random states and distribution are used unchanged; what it calls accumulation is
done inside a step, each objective in parts of its own size.
"""

import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.utils.data import Dataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.integrations import TensorBoardCallback

from gerund.errors import GerundError
from gerund.training.objectives.base import Objective
from gerund.training.processes import process_count, wait
from gerund.training.recipe import Recipe
from gerund.training.run_folder import TrainingLog, write_manifest
from gerund.training.sharding import (
    OPTIMIZER,
    WEIGHTS,
    are_sharded,
    gather_trained,
    is_sharded,
    optimizer_state_tensors,
    read_optimizer,
    read_weights,
    reshard,
    whole,
    write_shard,
)
from gerund.training.step import (
    TrainingModule,
    build_optimizer,
    evaluate_batches,
    learning_rate_factor,
    run_step,
    unwrapped,
)

_SCHEDULER = "scheduler.pt"
# Seconds.
_PATIENCE = 3 * 3600


class GerundTrainer(Trainer):
    """Runs a recipe on a :class:`TrainingModule`.

    ``snapshot`` is called with the step where the model is to be written; ``is_to_end`` is asked after every step
    whether the training is to end there, with a checkpoint.
    """

    def __init__(
        self,
        module: TrainingModule,
        recipe: Recipe,
        *,
        objectives: list[Objective],
        data: Dataset,
        checkpoints: Path,
        log: TrainingLog,
        snapshot: Callable[[int], None] | None = None,
        is_to_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self.recipe, self.objectives, self.training_log = recipe, objectives, log
        self.optimizer: torch.optim.Optimizer | None
        self.lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None
        super().__init__(
            model=module,
            args=training_arguments(recipe, checkpoints),
            train_dataset=data,
            eval_dataset=data,
            data_collator=itemgetter(0),  # an item of the data set is a whole step already
            callbacks=[_Bookkeeping(log, recipe.snapshot_steps, snapshot, is_to_end)],
        )
        self._validation = {
            name: [batches.make(0, i * o.config.batch_size, o.config.batch_size) for i in range(count)]
            for o in objectives
            for name, (batches, count) in o.validation.items()
        }
        self._validated: tuple[int, dict[str, float]] = (-1, {})
        self._since_log: dict[str, list[Tensor]] = {}
        self.remove_callback(PrinterCallback)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, TensorBoardCallback) and callback.logging_dir is None:
                callback.logging_dir = str(checkpoints.parent / "tensorboard")
        if is_sharded(module):
            # So that accelerate puts no DDP around it.
            module._is_accelerate_prepared = True  # type: ignore[assignment]
            clip = self.accelerator.clip_grad_norm_
            # The norm is a sum over shards, and would be logged as the first one's.
            self.accelerator.clip_grad_norm_ = lambda *args, **kwargs: whole(clip(*args, **kwargs))
        # Otherwise the processes would drop the same units out, each on its own texts.
        set_seed(recipe.seed + self.args.process_index)

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
        self, epoch_iterator: Iterator, num_batches: int, _device: torch.device
    ) -> tuple[list, Tensor | int | None]:
        """Take the steps as they come: they know their own counts."""
        return [item for _, item in zip(range(num_batches), epoch_iterator, strict=False)], None

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], _num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Run one step of all objectives and return its loss."""
        model.train()
        prepared = self._prepare_inputs(inputs)
        result = run_step(model, self.objectives, prepared)
        self.training_log.count(result.tokens)
        for name, value in result.losses.items():
            self._since_log.setdefault(name, []).append(value)
        total = torch.as_tensor(result.total)
        self._check_finite(model, total, result.losses, inputs)
        return total

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return and log the mean losses on the validation texts."""
        values: dict[str, float] = {}
        if self._validation:
            self.model.eval()
            for objective in self.objectives:
                for name in objective.validation:
                    batches = [self._prepare_inputs(batch) for batch in self._validation[name]]
                    result = evaluate_batches(self.model, objective, batches)
                    for key, value in result.items():
                        values[f"val_{name if objective.validated_by_source else key}"] = value
            reshard(self.model)
            self.model.train()
            step = self.state.global_step
            # A run that was cut off before the model was written comes here a second time.
            if not any(row["step"] == step and values.keys() <= row.keys() for row in self.training_log.rows):
                # Trackers file losses under "train" unless they are called this.
                super().log({f"eval_{name.removeprefix('val_')}": value for name, value in values.items()})
                self.training_log.write(step, values)
        self._validated = (self.state.global_step, values)
        return values

    def last_validation(self) -> dict[str, float]:
        """Return the validation losses of the weights as they are now."""
        step, values = self._validated
        return values if step == self.state.global_step else self.evaluate()

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Write losses down."""
        if "loss" in logs:
            logs = {**logs, **self._losses_since_log()}
        super().log(logs, start_time)
        if "loss" in logs:
            left_out = ("epoch", "train_runtime")
            self.training_log.write(self.state.global_step, {k: v for k, v in logs.items() if k not in left_out})

    def _losses_since_log(self) -> dict[str, float]:
        """Return the mean of each loss over the steps in which it took part, over all processes."""
        means = {name: torch.stack(values).mean() for name, values in self._since_log.items()}
        self._since_log.clear()
        if process_count() > 1:
            for value in means.values():
                distributed.all_reduce(value)
        return {name if name.endswith("_accuracy") else f"loss_{name}": float(value) for name, value in means.items()}

    def _check_finite(self, model: nn.Module, total: Tensor, losses: dict[str, Tensor], inputs: Any) -> None:
        """Stop before a step that would spoil the weights."""
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = whole(torch.nn.utils.get_total_norm(gradients))
        if math.isfinite(float(total + norm)):
            return
        step = self.state.global_step + 1
        text = ", ".join(f"{name} {float(value):.4g}" for name, value in losses.items())
        what = "the gradient" if math.isfinite(float(total)) else "the loss"
        # Each process has texts of its own, and any of them may be the bad one.
        suffix = f"-process-{self.args.process_index}" if process_count() > 1 else ""
        path = Path(self.args.output_dir).parent / f"failed-step-{step}{suffix}.safetensors"
        save_file({key: value.contiguous().cpu().clone() for key, value in _flattened(inputs)}, path)
        raise GerundError(
            f"{what} of step {step} is no finite number ({text}); its batch lies in {path}; "
            "lower optimizer.learning_rate, or train in precision: fp32"
        )

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the trained parameters; every process takes part, and the first one writes."""
        # The Trainer's own way fails on tied embeddings inside a wrapper and pickles its arguments.
        module, folder = unwrapped(self.model), Path(output_dir or self.args.output_dir)
        if is_sharded(module):
            reshard(module)
            trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
            self._write_shard(trained, folder, WEIGHTS)
        elif self.args.should_save:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(gather_trained(module), folder / f"{WEIGHTS}.safetensors")

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        module = unwrapped(self.model)
        if not is_sharded(module):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        self._write_shard(optimizer_state_tensors(module, self._bare_optimizer()), Path(output_dir), OPTIMIZER)
        if self.args.should_save:
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / _SCHEDULER)

    def _write_shard(self, tensors: dict[str, Any], folder: Path, stem: str) -> None:
        write_shard(tensors, folder, stem, index=self.args.process_index, count=self.args.world_size)

    def _bare_optimizer(self) -> torch.optim.Optimizer:
        """Return the recipe's optimizer, without what accelerate puts around it."""
        return getattr(self.optimizer, "optimizer", None) or self.create_optimizer()

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        read_weights(unwrapped(model or self.model), Path(resume_from_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        module = unwrapped(self.model)
        if checkpoint is None or not (is_sharded(module) or are_sharded(Path(checkpoint))):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        optimizer = self._bare_optimizer()
        read_optimizer(module, optimizer, Path(checkpoint))
        assert self.lr_scheduler is not None
        self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / _SCHEDULER, weights_only=True))
        # The next step's, which would otherwise be those of the first.
        for group, rate in zip(optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = rate

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        before = len(list(Path(checkpoint).glob("rng_state*.pth")))
        if before == self.args.world_size:
            super()._load_rng_state(checkpoint)
            return
        # Nobody has the state of these processes: dropout goes on with numbers that were not used before.
        seed = (self.recipe.seed + 1) * 1_000_003 + self.state.global_step * 1009 + self.args.process_index
        set_seed(seed % 2**32)
        now = self.args.world_size
        self.training_log.note(
            f"the checkpoint was written by {before} processes and read by {now}: dropout takes other random numbers"
        )


@dataclass(eq=False)
class _Bookkeeping(TrainerCallback):
    """Clocks the steps, asks for snapshots, and declares a checkpoint whole once everything is in it."""

    training_log: TrainingLog
    every: int | None
    snapshot: Callable[[int], None] | None
    is_to_end: Callable[[], bool]

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.training_log.step_begins()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.training_log.step_ends(state.global_step)
        if self.is_to_end():
            control.should_save = control.should_training_stop = True
        # A resumed log counts tokens and seconds on from its last line.
        control.should_log |= control.should_save
        if self.every and self.snapshot and state.global_step % self.every == 0 and args.process_index == 0:
            self.snapshot(state.global_step)

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        # The Trainer looks at these once more after the last step, and would overwrite a whole checkpoint.
        control.should_evaluate = control.should_save = False

    def on_save(self, args: TrainingArguments, state: Any, _control: Any, **_: Any) -> None:
        wait()  # each process writes its own random state
        if args.process_index == 0:
            write_manifest(Path(args.output_dir) / f"checkpoint-{state.global_step}")


def _flattened(inputs: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dictionaries under dotted names."""
    if isinstance(inputs, Tensor):
        yield name, inputs
    elif isinstance(inputs, dict):
        for key, value in inputs.items():
            yield from _flattened(value, f"{name}.{key}" if name else key)


def training_arguments(recipe: Recipe, checkpoints: Path) -> TrainingArguments:
    """Return what the Trainer is told."""
    cuda = torch.cuda.is_available()
    return TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=recipe.steps,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
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
        # Named for one process too, accelerate would look for a group that nobody has made.
        ddp_backend=("nccl" if cuda else "gloo") if int(os.environ.get("WORLD_SIZE", "1")) > 1 else None,
        ddp_find_unused_parameters=False,
        # The others wait as long as the first one reads weights and tokenises. (Who fails is noticed at once.)
        ddp_timeout=_PATIENCE,
        seed=recipe.seed,
        use_cpu=not cuda,
        dataloader_pin_memory=cuda,
        report_to=list(recipe.report_to) or "none",
        disable_tqdm=True,
    )
