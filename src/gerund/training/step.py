"""One optimizer step: gradients of every objective in parts that fit the memory, optimizers, and learning rates.

Gradients of all active objectives are summed by weight. Token losses are divided by the number of tokens of the whole
step, over all parts and processes, so parts of unequal size have the right weight. Contrastive losses see all texts of
the step together through cached gradients.
Processes exchange gradients once, in the last backward pass of the step.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from accelerate.utils import find_device
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from gerund.errors import ConfigError
from gerund.training.losses.contrastive import cached_loss
from gerund.training.objectives.base import (
    JointLosses,
    Losses,
    Objective,
    PairLosses,
    TokenLosses,
    groups,
    split_rows,
    tokens_in,
)
from gerund.training.processes import process_count
from gerund.training.recipe import OptimizerConfig, ScheduleConfig


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the hidden matrices and AdamW for everything else, as one optimizer.

    Muon orthogonalises the update of a matrix; embeddings, the output head, norms and biases are no maps
    between hidden states and stay with AdamW. ``match_rms_adamw`` scales Muon's update to the size of
    AdamW's, so one learning rate and one schedule serve both. The state dict holds both parts whole.
    """

    def __init__(
        self,
        matrices: list[nn.Parameter],
        others: list[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        betas: tuple[float, float] = (0.9, 0.95),
        epsilon: float = 1e-8,
        momentum: float = 0.95,
    ) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError("optimizer 'muon' needs torch 2.9 or newer; use 'adamw' or upgrade torch")
        self.muon = torch.optim.Muon(
            matrices, lr=lr, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="match_rms_adamw"
        )
        # AdamW refuses to have nothing to do.
        self.adamw = torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=betas, eps=epsilon) if others else None
        super().__init__([{"params": [*matrices, *others]}], {"lr": lr})
        self._share_groups()

    def _share_groups(self) -> None:
        # The very dicts of both parts, so that a scheduler writing here reaches both.
        self.param_groups = [*self.muon.param_groups, *(self.adamw.param_groups if self.adamw else [])]

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters."""
        loss = None if closure is None else closure()
        self.muon.step()
        if self.adamw is not None:
            self.adamw.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return both parts' state."""
        return {"muon": self.muon.state_dict(), "adamw": self.adamw.state_dict() if self.adamw else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over both parts' state."""
        self.muon.load_state_dict(state_dict["muon"])
        if self.adamw is not None:
            self.adamw.load_state_dict(state_dict["adamw"])
        self._share_groups()


def build_optimizer(module: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer that the recipe asks for, over the trainable parameters of ``module``.

    What lies in its ``losses`` serves the training only, and may have a learning rate of its own.
    """
    betas = (config.beta1, config.beta2)
    rate, decay = config.learning_rate, config.weight_decay
    if config.name == "muon":
        matrices, others = split_parameters(module)
        return MuonWithAdamW(matrices, others, lr=rate, weight_decay=decay, betas=betas, epsilon=config.epsilon)
    heads = getattr(module, "losses", None)
    served = {id(parameter) for parameter in heads.parameters()} if heads is not None else set()
    groups = []
    for parameters, own_decay in zip(split_parameters(module), (decay, 0.0), strict=True):
        for in_heads, own_rate in ((False, rate), (True, config.head_learning_rate or rate)):
            chosen = [p for p in parameters if (id(p) in served) == in_heads]
            if chosen:
                groups.append({"params": chosen, "weight_decay": own_decay, "lr": own_rate})
    if config.name == "adafactor":
        return torch.optim.Adafactor(groups, lr=rate)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, eps=config.epsilon)


def split_parameters(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the trainable hidden matrices, and everything else that is trainable."""
    vocabulary: set[int] = set()
    for module in model.modules():
        # An untied output head is a plain Linear; only the language model around it knows what it is.
        find_head = getattr(module, "get_output_embeddings", None)
        result = module if isinstance(module, nn.Embedding) else find_head() if callable(find_head) else None
        if result is not None:
            vocabulary.update(id(parameter) for parameter in result.parameters(recurse=False))
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            hidden = parameter.ndim == 2 and id(parameter) not in vocabulary
            (matrices if hidden else others).append(parameter)
    return matrices, others


def learning_rate_factor(config: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """Return the function from step to the factor on the learning rate.

    ``wsd`` warms up, stays, and falls over the last ``decay_steps`` as one minus a square root; what lies
    before the fall does not depend on the number of steps, so a stable run can be ended earlier or later.
    """
    warmup, decay = config.warmup_steps, config.decay_steps or 0

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / (warmup + 1)
        progress = (step - warmup) / max(1, steps - warmup)
        if config.name == "linear":
            return config.floor + (1 - config.floor) * (1 - min(1.0, progress))
        if config.name == "cosine":
            return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        if config.name == "wsd" and step > steps - decay:
            progress = (step - (steps - decay)) / decay
            return config.floor + (1 - config.floor) * (1 - math.sqrt(min(1.0, progress)))
        return 1.0

    return factor


class TrainingModule(nn.Module):
    """The language model together with what serves its training only; called once a part.

    Losses and vectors are computed inside and only they leave, so that no wrapper around the module copies logits.
    Trained weights stay fp32; ``bf16`` runs the forward pass under autocast.
    """

    # Tells the Trainer that the division by the number of tokens is ours.
    accepts_loss_kwargs = False

    def __init__(self, model: PreTrainedModel, losses: Mapping[str, Losses], *, bf16: bool = False) -> None:
        super().__init__()
        self.model = model
        # Their parameters are trained, saved and moved with the model's.
        self.losses = nn.ModuleDict({name: item.heads for name, item in losses.items() if item.heads is not None})
        self._compute = dict(losses)
        self.bf16 = bf16

    def forward(self, name: str, part: dict[str, Tensor], *, touch_all: bool = False, joint: bool = False) -> Any:
        """Return what the losses of objective ``name`` make of ``part``.

        With ``joint`` they are :class:`JointLosses`, and their losses over tokens come with the vectors. With
        ``touch_all`` every trained parameter takes part, with gradient zero where it is not needed: the one
        pass in which processes exchange gradients must know them all.
        """
        device = next(iter(part.values())).device.type
        with torch.autocast(device, torch.bfloat16) if self.bf16 else nullcontext():
            losses: Any = self._compute[name]
            result = losses.joint(self.model, part) if joint else losses(self.model, part)
        # Vectors may be a view, which FSDP does not want to see leave a module.
        if isinstance(result, Tensor):
            result = result.clone()
        elif isinstance(result, tuple):
            result = (result[0].clone(), result[1])
        if not touch_all:
            return result
        nothing = sum((0 * p.view(-1)[0] for p in self.parameters() if p.requires_grad), torch.zeros(()))
        if isinstance(result, dict):
            return {key: value + nothing for key, value in result.items()}
        return (result[0] + nothing, result[1]) if joint else result + nothing


class StepData(Dataset[dict[str, Any]]):
    """Item ``i`` is everything that process ``i % processes`` reads in step ``i // processes``.

    A pure function of ``i``: a resumed training sees exactly what the interrupted one would have seen, and several
    processes together read what one would have read.

    The number of processes divides every batch size.
    """

    def __init__(self, objectives: list[Objective], *, steps: int, processes: int = 1) -> None:
        self.objectives, self.steps, self.processes = objectives, steps, processes

    def __len__(self) -> int:
        return self.steps * self.processes

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the batches of the objectives that are active in the step, by name, and the step itself."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        step, rank = divmod(index, self.processes)
        item: dict[str, Any] = {"step": step}
        for objective in self.objectives:
            if objective.is_active(step):
                rows = objective.config.batch_size // self.processes
                first = step * objective.config.batch_size + rank * rows
                item[objective.name] = objective.batches.make(step, first, rows)
        return item


class StepResult:
    """The losses of one step, as this process's parts of the means, and the tokens of all processes."""

    def __init__(self) -> None:
        self.total: Tensor | float = 0.0
        self.losses: dict[str, Tensor] = {}
        self.tokens = 0

    def add(self, name: str, value: Tensor) -> None:
        """Add a part's contribution to loss ``name``."""
        self.losses[name] = self.losses[name] + value.detach() if name in self.losses else value.detach()


def run_step(module: nn.Module, objectives: list[Objective], inputs: dict[str, Any]) -> StepResult:
    """Add the gradients of one optimizer step to the parameters."""
    step = inputs["step"]
    active = [objective for objective in objectives if objective.name in inputs]
    result = StepResult()
    counts, result.tokens = _counts(active, inputs)
    for objective in active:
        batch = inputs[objective.name]
        last = objective is active[-1]
        weights = objective.weights(step)
        if isinstance(objective.losses, TokenLosses):
            _token_step(module, objective, batch, weights, counts, last, result)
        else:
            _pair_step(module, objective, batch, weights, counts, last, result)
    _fill_missing_gradients(module, [objective for objective in objectives if objective not in active])
    return result


def _fill_missing_gradients(module: nn.Module, inactive: list[Objective]) -> None:
    """Make gradients of zero out of none, but for the heads of objectives that do not take part.

    An optimizer leaves alone what has no gradient, and goes on by its momentum where there is one of zero. In several
    processes everything has one, because DDP waits for all; so it has to be the same in one.
    """
    heads = {id(parameter) for objective in inactive for parameter in objective.losses.parameters()}
    for parameter in module.parameters():
        if id(parameter) in heads:
            parameter.grad = None
        elif parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _token_step(
    module: nn.Module,
    objective: Objective,
    batch: dict[str, Tensor],
    weights: dict[str, float],
    counts: dict[str, float],
    last: bool,
    result: StepResult,
) -> None:
    processes = process_count()
    parts = split_rows(batch, objective.config.micro_batch_size)
    for index, part in enumerate(parts):
        touch_all = _exchange_gradients(module, last and index == len(parts) - 1)
        sums = module(objective.name, part, touch_all=touch_all)
        # DDP takes the mean over processes of what is a sum over them.
        loss = sum(weights[name] * value / counts[name] for name, value in sums.items()) * processes
        loss.backward()
        for name, value in sums.items():
            result.add(name, value / counts[name])
        result.total = result.total + loss.detach()


def _pair_step(
    module: nn.Module,
    objective: Objective,
    batch: dict[str, dict[str, Tensor]],
    weights: dict[str, float],
    counts: dict[str, float],
    last: bool,
    result: StepResult,
) -> None:
    losses = objective.losses
    assert isinstance(losses, PairLosses)
    joint = isinstance(losses, JointLosses) and bool(losses.counts(batch))
    name = next(iter(weights))
    processes = process_count()
    size = objective.config.micro_batch_size
    if size is None and not isinstance(module, DistributedDataParallel):
        # Everything at once needs no second pass. (DDP takes one forward pass for each backward pass.)
        chunks = [list(batch.values())]
    else:
        # A micro-batch is so many queries; its parts are that many texts of each group.
        chunks = [[part] for part in groups(batch, size)]
    right = 0.0
    done = 0
    compared = torch.zeros(())
    extra_losses: list[Tensor] = []

    def embed(chunk: list[dict[str, Tensor]]) -> Tensor:
        nonlocal done
        done += torch.is_grad_enabled()
        touch_all = _exchange_gradients(module, last and done == len(chunks))
        if not (joint and torch.is_grad_enabled()):
            return torch.cat([module(objective.name, part, touch_all=touch_all) for part in chunk])
        made = [module(objective.name, part, touch_all=touch_all, joint=True) for part in chunk]
        for _, sums in made:
            for key, value in sums.items():
                # DDP takes the mean over processes of what is a sum over them.
                extra_losses.append(weights[key] * value / counts[key] * processes)
                result.add(key, value / counts[key])
        return torch.cat([vectors_BD for vectors_BD, _ in made])

    def compare(vectors_ND: Tensor) -> Tensor:
        nonlocal right, compared
        loss, right = losses.compare(vectors_ND, batch, gather=True)
        compared = loss.detach()
        return weights[name] * loss

    def push(scalar: Tensor, _is_last_chunk: bool) -> None:
        """Send both losses back through the one pass that they share."""
        for value in extra_losses:
            scalar = scalar + value
            result.total = result.total + value.detach()
        extra_losses.clear()
        scalar.backward()

    with losses.heads.during(unwrapped(module).model):
        loss = cached_loss(embed, chunks, compare, backward=push)
    queries = len(batch["query"]["identity"])
    result.add(name, compared / processes)
    # On the device of the loss: processes on GPUs cannot exchange what lies on the CPU.
    fraction = torch.as_tensor(right / queries / processes, dtype=torch.float32, device=loss.device)
    result.add(f"{name}_accuracy", fraction)
    result.total = result.total + loss


@torch.no_grad()
def evaluate_batches(module: nn.Module, objective: Objective, batches: list[dict[str, Any]]) -> dict[str, float]:
    """Return the means of an objective's losses over ``batches``, in evaluation mode, of this process alone."""
    losses = objective.losses
    sums: defaultdict[str, float] = defaultdict(float)
    counts = Counter[str]()
    for batch in batches:
        if isinstance(losses, TokenLosses):
            counts.update(losses.counts(batch))
            for part in split_rows(batch, objective.config.micro_batch_size):
                for name, value in unwrapped(module)(objective.name, part).items():
                    sums[name] += float(value)
        else:
            _evaluate_pairs(module, objective, batch, sums, counts)
    return {name: total / max(1, counts[name]) for name, total in sums.items()}


def _evaluate_pairs(
    module: nn.Module, objective: Objective, batch: dict[str, Any], sums: dict[str, float], counts: Counter[str]
) -> None:
    """Add the losses of a batch of pairs, and over how much they are summed."""
    losses = objective.losses
    assert isinstance(losses, PairLosses)
    written = losses.counts(batch) if isinstance(losses, JointLosses) else {}
    name = next(iter(objective.configs))
    vectors: list[Tensor] = []
    for part in groups(batch, objective.config.micro_batch_size):
        made = unwrapped(module)(objective.name, part, joint=bool(written))
        vectors.append(made[0] if written else made)
        for key, value in (made[1] if written else {}).items():
            sums[key] += float(value)
    counts.update(written)
    loss, _ = losses.compare(torch.cat(vectors), batch, gather=False)
    sums[name] += float(loss)
    counts[name] += 1


def unwrapped(module: nn.Module) -> TrainingModule:
    """Return the training module inside what wraps it for several processes."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(inner, TrainingModule)
    return inner


def _exchange_gradients(module: nn.Module, wanted: bool) -> bool:
    """Say whether the next backward pass exchanges gradients, and return whether it has to touch all parameters.

    What DDP's ``no_sync`` does, without its block. FSDP exchanges a layer's gradients whenever it has some.
    """
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = wanted
        return wanted
    return False


def _counts(active: list[Objective], inputs: dict[str, Any]) -> tuple[dict[str, float], int]:
    """Return over how many tokens each loss sums in this step, at least 1, and how many are read: in all processes."""
    summed: dict[str, float] = {}
    for objective in active:
        if isinstance(objective.losses, TokenLosses | JointLosses):
            summed.update(objective.losses.counts(inputs[objective.name]))
    numbers = [float(sum(tokens_in(inputs[objective.name]) for objective in active)), *summed.values()]
    if process_count() > 1:
        reduced = torch.tensor(numbers, dtype=torch.float64, device=find_device(inputs))
        distributed.all_reduce(reduced)
        numbers = reduced.tolist()
    tokens, *counts = numbers
    return {name: max(1.0, count) for name, count in zip(summed, counts, strict=True)}, int(tokens)
