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

# Logits in float32 that are held at once: 64 MB.
_LOGITS_AT_ONCE = 2**24
_CHECK_LENGTH = 6
# bfloat16 keeps eight bits, and a head may add its numbers up in another order for another number of rows.
_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_CHECK_TOLERANCE_HALF = 3e-2


class TokenHead:
    """From last hidden states to the log-probabilities of tokens, by the model's own forward pass.

    Architectures scale or cap their logits in ways of their own, all of which stand in ``forward`` behind the
    decoder. So ``forward`` runs with a stand-in for the decoder that returns states which are known already:
    a few rows at a time, and only those that are asked for. No parameter is copied, the model is not touched.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = copy.copy(model)
        # The copy shares everything; a table of modules of its own lets one of them be another.
        self._model._modules = {**model._modules, model.base_model_prefix: _StandIn(model.base_model)}
        if model not in _verified:
            self._verify(model)
            _verified.add(model)

    def logits(self, states_ND: Tensor) -> Tensor:
        """Return the logits ``(N, V)`` of last hidden states, as the model computes them; with gradients if enabled."""
        # Of the class: hooks that belong to the whole model have nothing to do here.
        output = type(self._model).forward(self._model, inputs_embeds=states_ND[None], use_cache=False)
        logits_NV: Tensor = output.logits[0]
        return logits_NV

    @torch.no_grad()
    def logprobs(self, states_ND: Tensor, tokens_N: Tensor) -> np.ndarray:
        """Return the log-probability of each token after the state that predicts it, ``(N,)`` float32."""
        rows = max(1, _LOGITS_AT_ONCE // self._model.config.get_text_config(decoder=True).vocab_size)
        parts = [
            -functional.cross_entropy(self.logits(states_ND[start : start + rows]).float(), part_N, reduction="none")
            for start, part_N in zip(range(0, len(tokens_N), rows), tokens_N.split(rows), strict=True)
        ]
        return torch.cat(parts).cpu().numpy()

    @torch.no_grad()
    def certainty(self, states_ND: Tensor, tokens_N: Tensor) -> np.ndarray:
        """Return the divergence of the even distribution from the prediction after each state, ``(N,)`` float32."""
        del tokens_N
        rows = max(1, _LOGITS_AT_ONCE // self._model.config.get_text_config(decoder=True).vocab_size)
        parts = []
        for part_ND in states_ND.split(rows):
            logprobs_NV = self.logits(part_ND).float().log_softmax(dim=-1)
            parts.append(-logprobs_NV.mean(dim=-1) - math.log(logprobs_NV.shape[-1]))
        return torch.cat(parts).cpu().numpy()

    @torch.no_grad()
    def alternatives(self, states_ND: Tensor, tokens_N: Tensor, count: int) -> np.ndarray:
        """Return of each token its log-probability, then the ids of the most likely ones, then theirs, ``(N, 1 + 2k)``.

        Ids are whole numbers in float64, which holds all of them.
        """
        rows = max(1, _LOGITS_AT_ONCE // self._model.config.get_text_config(decoder=True).vocab_size)
        parts = []
        for part_ND, part_N in zip(states_ND.split(rows), tokens_N.split(rows), strict=True):
            logprobs_NV = self.logits(part_ND).float().log_softmax(dim=-1)
            best = logprobs_NV.topk(min(count, logprobs_NV.shape[-1]), dim=-1)
            own_N1 = logprobs_NV.gather(1, part_N[:, None])
            # Not every device has float64.
            parts.append(torch.cat([one.cpu().double() for one in (own_N1, best.indices, best.values)], dim=-1))
        return torch.cat(parts).numpy()

    @torch.no_grad()
    def _verify(self, model: PreTrainedModel) -> None:
        table = model.get_input_embeddings().weight
        ids = (torch.arange(_CHECK_LENGTH, device=table.device) * 7 + 3)[None] % len(table)
        # A model in training drops parts at random; and autocast in older torch (2.8 among them) would remember the
        # weights that it casts here, cut off from their gradients.
        with _evaluating(model), torch.autocast(table.device.type, enabled=False):
            whole = model(ids, use_cache=False).logits[0].float()
            try:
                own = self.logits(model.base_model(ids, use_cache=False).last_hidden_state[0]).float()
            except (AttributeError, TypeError, ValueError) as error:
                raise ModelError(_unheaded(model)) from error
        tolerance = _CHECK_TOLERANCE.get(model.dtype, _CHECK_TOLERANCE_HALF) * max(1.0, float(whole.abs().max()))
        if own.shape != whole.shape or float((own - whole).abs().max()) > tolerance:
            raise ModelError(_unheaded(model))


# Reads one number off the head for each state and the token that it predicts, or a row of numbers.
Read = Callable[[TokenHead, Tensor, Tensor], np.ndarray]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode until the block ends, and then those back that were not."""
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


# Models whose head was found to run on its own.
_verified: WeakSet[PreTrainedModel] = WeakSet()


class _StandIn(nn.Module):
    """Stands where a decoder was, and returns what it is given as if it had computed it."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        # Not as a module of its own: nothing of the decoder is to run here.
        self.__dict__["_own"] = decoder

    def __getattr__(self, name: str) -> Any:
        """Return what else a head reads off its decoder, such as a factor."""
        return getattr(self.__dict__["_own"], name)

    def forward(self, *_args: Any, inputs_embeds: Tensor, **_kwargs: Any) -> "_Known":
        """Return the states."""
        return _Known(inputs_embeds)

    @property
    def decoder(self) -> nn.Module:
        """The part of it that OPT and BART call."""
        return self


class _Known:
    """A decoder's output that has its last hidden states and nothing else."""

    def __init__(self, states_BTD: Tensor) -> None:
        self.last_hidden_state = states_BTD

    def __getattr__(self, name: str) -> None:
        """Caches, attentions, routers: there are none."""

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]
