"""Run transformers' generation loop, with the next tokens chosen by the caller.

The loop's own sampling reads torch's global random state, which threads would share, and the defaults in the model's
folder.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from gerund.attention.layer_state import CACHE
from gerund.inference.generate.kv_cache import cache_for
from gerund.inference.text_ids import end_ids

# The settings used from a model's own generation config: special tokens, and how its cache works. All others would
# change logits or end texts: they are transformers' defaults for what a call omits.
_USED = (
    *("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("use_cache", "cache_implementation", "cache_config"),
)
# What transformers caches on a model between calls: a compiled pass, for caches of a fixed size on a GPU.
_CACHED = ("_compiled_call", "_last_compile_config", "_previous_max_cache_length")


@torch.no_grad()
def transformers_loop(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
    choose: LogitsProcessor,
    stop: StoppingCriteria,
    *,
    room: int,
    decode: Callable[..., Tensor] | None = None,
    ignore_eos: bool = False,
) -> None:
    """Continue prompts in one batch, up to ``room`` tokens each.

    ``choose`` gets the logits ``(B, V)`` and leaves only the tokens that it chose; ``stop`` tells which rows are done.
    ``decode`` replaces transformers' own loop (``custom_generate``). With ``ignore_eos`` end tokens end nothing.
    """
    width = max(len(ids) for ids in prompts)
    ends = end_ids(model, tokenizer)
    pad = next(iter([*([tokenizer.pad_token_id] if tokenizer.pad_token_id is not None else []), *ends, 0]))
    ids = torch.full((len(prompts), width), pad, dtype=torch.long)
    real = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padding goes left, as generation continues at the right
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        real[row, width - len(prompt) :] = 1
    settings = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=room,
        pad_token_id=pad,
        eos_token_id=None if ignore_eos else ends or None,
        use_cache=None if decode is None else False,  # a custom loop has its own cache
    )
    cache = cache_for(model) if decode is None else None
    plain = _plain(model, ignore_eos=ignore_eos)
    plain.generate(
        ids.to(model.device),
        attention_mask=real.to(model.device),
        generation_config=settings,
        logits_processor=LogitsProcessorList([choose]),
        stopping_criteria=StoppingCriteriaList([stop]),
        custom_generate=decode,
        **({} if cache is None else {CACHE: cache}),
    )
    vars(model).update({name: value for name, value in vars(plain).items() if name in _CACHED})


def _plain(model: PreTrainedModel, *, ignore_eos: bool) -> PreTrainedModel:
    """Return the same model with an empty generation config."""
    usual, plain = model.generation_config, copy.copy(model)
    plain.generation_config = GenerationConfig()
    for name in _USED:
        if ignore_eos and name == "eos_token_id":
            continue
        if (value := getattr(usual, name, None)) is not None:
            setattr(plain.generation_config, name, value)
    return plain
