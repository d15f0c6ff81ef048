"""One causal pass over a text that serves twice: its states are pooled into a vector, its cache is written on from.

Knows: how a text's tokens divide into those that are continued and those that only close it for the encoder.
Does not know: attention plans other than the causal one, how tokens are chosen.
"""

import copy
import inspect
from dataclasses import dataclass, field
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from transformers import Cache, LogitsProcessorList, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteriaList

from gerund.config import Sampling
from gerund.errors import ConfigError, TextError
from gerund.inference.encode.runtime import EncoderRuntime, pooled
from gerund.inference.generate import generation
from gerund.inference.generate.prompts import prompt_ids
from gerund.inference.generate.settings import Options, Settings
from gerund.inference.tokens import InputFormat, tokenize
from gerund.models.pooling import unit
from gerund.types import Generation


@dataclass(frozen=True)
class Session:
    """A text that the model has read, ready to be continued any number of times, from several threads too.

    Made by ``LanguageModel.encode_and_keep``. It holds keys and values of the whole text until it is dropped.

    Attributes:
        text: what is continued: the text, after the prompt where one was given.
        token_ids: its token ids, as ``generate`` would read them.
    """

    text: str
    token_ids: list[int] = field(repr=False)
    _model: PreTrainedModel = field(repr=False)
    _tokenizer: PreTrainedTokenizerBase = field(repr=False)
    _cache: Cache = field(repr=False)
    _logits_BV: Tensor = field(repr=False)

    def generate(
        self, max_new_tokens: int = 64, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Generation:
        """Continue the text without reading it again.

        Every call starts from the end of the text. The result is that of ``LanguageModel.generate`` for the
        same text, bit for bit (on a GPU up to rounding for mixtures of experts, which transformers' own loop
        computes another way there).

        Args:
            max_new_tokens: how much to write at most; less where the model's context ends first.
            sampling: how tokens are chosen; None is greedy.
            options: what ends the text, which form it has, and what is said of its tokens, as in ``generate``; all
                but ``n``.

        Raises:
            ConfigError: a setting is impossible.
        """
        settings = Settings.of(max_new_tokens, sampling, options)
        if settings.n != 1:
            raise ConfigError(f"n={settings.n}: a session continues its text once a call; call it again")
        return generation.continue_read(
            self._model,
            self._tokenizer,
            self.token_ids,
            self._decode,
            settings,
        )

    def _decode(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        **_settings: Any,
    ) -> Tensor:
        """Write token by token, greedily among the processed scores; return text and continuation ``(1, T)``."""
        cache = copy.deepcopy(self._cache)
        logits_BV = self._logits_BV
        while True:
            # Processors may write into what they are given.
            scores_BV = logits_processor(input_ids, logits_BV.to(copy=True, dtype=torch.float32))
            chosen_BT = scores_BV.argmax(dim=-1, keepdim=True)
            input_ids = torch.cat([input_ids, chosen_BT], dim=-1)
            if stopping_criteria(input_ids, None).all():
                return input_ids
            logits_BV = model(input_ids=chosen_BT, past_key_values=cache, use_cache=True).logits[:, -1]


def encode_and_keep(runtime: EncoderRuntime, prompt: str, text: str) -> tuple[np.ndarray, Session]:
    """Read a text once, in the type of the weights; see ``LanguageModel.encode_and_keep``.

    Args:
        runtime: the model, without an adapter.
        prompt: put before the text.
        text: the text.

    Returns:
        Its vector ``(D,)`` float32 and the session that continues it.

    Raises:
        ConfigError: the plan is not causal, or reads the text twice.
        TextError: the text is empty, or too long to be encoded or continued.
    """
    _refuse_plan(runtime)
    if not text.strip():
        raise TextError("the text is empty, so there is nothing to encode")
    whole = prompt + text if prompt else text
    ids = prompt_ids(runtime.model, runtime.tokenizer, whole, "the text")
    [tokens] = tokenize(runtime.tokenizer, [text], InputFormat(prompt, append_eos=runtime.config.append_eos))
    assert tokens is not None  # only empty texts have none
    if runtime.max_length is not None and len(tokens) > runtime.max_length:
        raise TextError(
            f"the text has {len(tokens)} tokens and there is room for {runtime.max_length}; shorten it: what is to be "
            "continued is not cut"
        )
    if tokens.ids[: len(ids)] != ids:
        raise TextError("this tokenizer ends a text in a way that cannot be continued; use encode and generate apart")
    kept, logits_BV, hidden_BTD = _read(runtime, ids)
    closing = tokens.ids[len(ids) :]
    if closing:
        # End tokens belong to the vector alone: they are read on a copy, and the session goes on from the text.
        closing_BT = torch.tensor([closing], device=runtime.device)
        with torch.no_grad():
            after = runtime.model.base_model(closing_BT, past_key_values=copy.deepcopy(kept), use_cache=True)
        hidden_BTD = torch.cat([hidden_BTD, after.last_hidden_state], dim=1)
    [vector] = pooled(runtime, [tokens], hidden_BTD, torch.zeros(1, dtype=torch.long, device=hidden_BTD.device))
    if runtime.config.normalize:
        vector = unit(vector)
    return vector, Session(whole, ids, runtime.model, runtime.tokenizer, kept, logits_BV)


def _refuse_plan(runtime: EncoderRuntime) -> None:
    name = runtime.config.attention.name
    runtime.config.refuse_methods("a pass that generation goes on from")
    if runtime.plan.repeats_text:
        raise ConfigError(f"the plan {name!r} reads the text twice; load the model with the plan 'causal'")
    if not runtime.plan.is_causal:
        raise ConfigError(
            f"the plan {name!r} is not causal, so nothing can be continued from its pass; load the model with the "
            "plan 'causal'"
        )


@torch.no_grad()
def _read(runtime: EncoderRuntime, ids: list[int]) -> tuple[Cache, Tensor, Tensor]:
    """Return cache, logits ``(1, V)`` of what comes next, and last hidden states ``(1, T, D)``, of one pass.

    It is the pass with which transformers' ``generate`` begins: logits for the last token alone, since those of a
    larger product may differ in their last bits.
    """
    inputs: dict[str, Any] = {"input_ids": torch.tensor([ids], device=runtime.device)}
    if "logits_to_keep" in inspect.signature(runtime.model.forward).parameters:
        inputs["logits_to_keep"] = 1
    output = runtime.model(**inputs, use_cache=True, output_hidden_states=True)
    # transformers puts the state after the final norm last, which is the one that the encoder reads.
    return output.past_key_values, output.logits[:, -1].clone(), output.hidden_states[-1]
