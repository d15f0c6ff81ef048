"""Optimizers (AdamW, Muon, Adafactor) and learning-rate schedules by name."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gerund.errors import ConfigError

if TYPE_CHECKING:
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


def build_optimizer(module: nn.Module, config: "OptimizerConfig") -> torch.optim.Optimizer:
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


def learning_rate_factor(config: "ScheduleConfig", steps: int) -> Callable[[int], float]:
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
