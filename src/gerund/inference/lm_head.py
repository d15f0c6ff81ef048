"""Run the head of a language model on known last hidden states."""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from gerund.errors import ModelError

# Float32 logits per pass: 64 MB.
_LOGITS_AT_ONCE = 2**24
_CHECK_LENGTH = 6
# bfloat16 has eight bits, and a head may sum in another order for another number of rows.
_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_CHECK_TOLERANCE_HALF = 3e-2


class TokenHead:
    """From last hidden states to logits and log-probabilities, by the model's own forward pass.

    Architectures scale or cap their logits in different ways, all of them in ``forward`` after the decoder. So
    ``forward`` runs with a stand-in for the decoder that returns given states. No parameter is copied. Raises
    ``ModelError`` where that gives other logits than the full model, which is checked once per model.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.copy(model)
        # The copy shares everything but its table of modules, in which one is replaced.
        self._model._modules = {**model._modules, model.base_model_prefix: _StandIn(model.base_model)}
        if model not in _verified:
            self._verify(model)
            _verified.add(model)

    def logits(self, states_ND: Tensor) -> Tensor:
        """Return the logits ``(N, V)`` of last hidden states, as the model computes them; with gradients if enabled."""
        # The forward of the class: hooks of the full model do not run here.
        output = type(self._model).forward(self._model, inputs_embeds=states_ND[None], use_cache=False)
        logits_NV: Tensor = output.logits[0]
        return logits_NV

    def logprobs(self, states_ND: Tensor, tokens_N: Tensor) -> np.ndarray:
        """Return the log-probability of each token after the state that predicts it, ``(N,)`` float32."""

        def read(logits_NV: Tensor, part_N: Tensor) -> Tensor:
            return -functional.cross_entropy(logits_NV, part_N, reduction="none")

        return self._in_parts(states_ND, tokens_N, read)

    def certainty(self, states_ND: Tensor, tokens_N: Tensor) -> np.ndarray:
        """Return the divergence of the uniform distribution from the prediction after each state, ``(N,)`` float32."""

        def read(logits_NV: Tensor, _: Tensor) -> Tensor:
            return -logits_NV.log_softmax(dim=-1).mean(dim=-1) - math.log(logits_NV.shape[-1])

        return self._in_parts(states_ND, tokens_N, read)

    def alternatives(self, states_ND: Tensor, tokens_N: Tensor, count: int) -> np.ndarray:
        """Return per token its log-probability, the ``k`` most likely ids, and their log-probabilities ``(N, 1 + 2k)``.

        Ids are whole numbers in float64, which represents all of them exactly.
        """

        def read(logits_NV: Tensor, part_N: Tensor) -> Tensor:
            logprobs_NV = logits_NV.log_softmax(dim=-1)
            best = logprobs_NV.topk(min(count, logprobs_NV.shape[-1]), dim=-1)
            own_N1 = logprobs_NV.gather(1, part_N[:, None])
            # Not every device has float64.
            return torch.cat([part.cpu().double() for part in (own_N1, best.indices, best.values)], dim=-1)

        return self._in_parts(states_ND, tokens_N, read)

    @torch.no_grad()
    def _in_parts(self, states_ND: Tensor, tokens_N: Tensor, read: Callable[[Tensor, Tensor], Tensor]) -> np.ndarray:
        """Compute the float32 logits ``(N, V)`` of some rows at a time."""
        rows = max(1, _LOGITS_AT_ONCE // self._model.config.get_text_config(decoder=True).vocab_size)
        parts = zip(states_ND.split(rows), tokens_N.split(rows), strict=True)
        return torch.cat([read(self.logits(part_ND).float(), part_N) for part_ND, part_N in parts]).cpu().numpy()

    @torch.no_grad()
    def _verify(self, model: PreTrainedModel) -> None:
        table = model.get_input_embeddings().weight
        ids = (torch.arange(_CHECK_LENGTH, device=table.device) * 7 + 3)[None] % len(table)
        # A model in training has dropout; and autocast in older torch (2.8 among them) would cache the weights that it
        # casts here, without their gradients.
        with _evaluating(model), torch.autocast(table.device.type, enabled=False):
            whole = model(ids, use_cache=False).logits[0].float()
            try:
                computed = self.logits(model.base_model(ids, use_cache=False).last_hidden_state[0]).float()
            except (AttributeError, TypeError, ValueError) as error:
                raise ModelError(_unheaded(model)) from error
        tolerance = _CHECK_TOLERANCE.get(model.dtype, _CHECK_TOLERANCE_HALF) * max(1.0, float(whole.abs().max()))
        if computed.shape != whole.shape or float((computed - whole).abs().max()) > tolerance:
            raise ModelError(_unheaded(model))


# Reads one number or row of numbers per state and the token that it predicts.
Read = Callable[[TokenHead, Tensor, Tensor], np.ndarray]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode until the block ends."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _unheaded(model: PreTrainedModel) -> str:
    return (
        f"this {model.config.model_type} model computes its logits from more than the last hidden state, so the "
        "log-probabilities of texts cannot be measured; take another architecture"
    )


# Models whose head is known to run on its own.
_verified: WeakSet[PreTrainedModel] = WeakSet()


class _StandIn(nn.Module):
    """Replaces a decoder, and returns given states as if it had computed them."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        # Not as a submodule: nothing of the decoder must run here.
        self.__dict__["_own"] = decoder

    def __getattr__(self, name: str) -> Any:
        """Return what else a head reads from its decoder, such as a factor."""
        return getattr(self.__dict__["_own"], name)

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_kwargs: Any) -> "_Known":
        """Return the states."""
        return _Known(inputs_embeds)

    @property
    def decoder(self) -> nn.Module:
        """The submodule that OPT and BART call."""
        return self


class _Known:
    """A decoder's output with nothing but last hidden states."""

    def __init__(self, states_BTD: Tensor) -> None:
        self.last_hidden_state = states_BTD

    def __getattr__(self, name: str) -> None:
        """Return None for caches, attentions and routers."""

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]
