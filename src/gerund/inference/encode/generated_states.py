"""Pool the states of the tokens with which the model continues a text.

"The Truth Lies Somewhere in the Middle (of the Generated Tokens)" (2026, arXiv 2605.09969): the mean of the hidden
states of generated tokens says more of a text than any one token's. Here tokens are generated greedily, never one that
ends a text, and each one's state is that which the model has after reading it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from gerund.attention.cache_names import CACHE
from gerund.attention.layouts import is_one_graph
from gerund.attention.recurrent import keeps_states
from gerund.errors import UnsupportedModelError
from gerund.inference.lm_head import TokenHead
from gerund.inference.text_ids import end_ids
from gerund.inference.tokens import Tokens

if TYPE_CHECKING:
    from gerund.inference.encode.runtime import EncoderRuntime


@torch.no_grad()
def generated_states(runtime: "EncoderRuntime", texts: Sequence[Tokens], count: int) -> Tensor:
    """Return the last hidden states ``(B, count, D)`` of the tokens that continue each text.

    Texts of one length are run together, so that there is no padding in a cache.

    Raises:
        UnsupportedModelError: the model keeps other states than keys and values, or runs as one graph.
    """
    model = runtime.model
    if is_one_graph(model):
        raise UnsupportedModelError("generated needs a cache that a packed model has not: take runtime='torch'")
    if keeps_states(model):
        raise UnsupportedModelError(f"generated is for attention alone; {model.config.model_type} has recurrent layers")
    head, ends = TokenHead(model), end_ids(model, runtime.tokenizer)
    found: dict[int, Tensor] = {}
    for length in sorted({len(text) for text in texts}):
        rows = [row for row, text in enumerate(texts) if len(text) == length]
        next_BT = torch.tensor([texts[row].ids for row in rows], device=runtime.device)
        states, cache = list[Tensor](), None
        with runtime.computing():
            for _ in range(count + 1):
                output = model.base_model(next_BT, use_cache=True, **({} if cache is None else {CACHE: cache}))
                states.append(output.last_hidden_state[:, -1])
                cache = getattr(output, CACHE)
                if len(states) <= count:
                    logits_BV = head.logits(states[-1]).float()
                    logits_BV[:, ends] = -torch.inf
                    next_BT = logits_BV.argmax(dim=-1, keepdim=True)
        found |= dict(zip(rows, torch.stack(states[1:], dim=1), strict=True))
    return torch.stack([found[row] for row in range(len(texts))])
