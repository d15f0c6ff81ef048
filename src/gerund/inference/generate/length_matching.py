"""Continuations about as long as given ones: what generated texts are compared with people's by.

Knows: generation, lengths in tokens. Does not know: sentences, what the texts are for.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.errors import ConfigError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.generation import generate
from gerund.inference.text_ids import text_ids
from gerund.inference.tokens import context_length, keep_end
from gerund.settings.sampling import Sampling


def continuations_of_length(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prefixes: Sequence[str],
    examples: Sequence[str],
    sampling: Sampling,
    *,
    batch_size: int,
    key: Sequence[int],
) -> list[str]:
    """Return a continuation of each prefix: as many tokens as its example, and some more for a sentence to end.

    Args:
        model: the language model.
        tokenizer: its tokenizer.
        prefixes: any texts; of one that leaves no room in the model's context the end is continued.
        examples: for each prefix a text of the length that is wanted.
        sampling: how tokens are chosen; its seed is not read.
        batch_size: prefixes in one pass, those with examples of like length together.
        key: the seed; each prefix has one of its own, made of this key and its number.

    Raises:
        ConfigError: the context has no room for a prefix beside such an example.
    """
    lengths = [len(text_ids(tokenizer, text, specials=False)) for text in examples]
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    texts = [""] * len(lengths)
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        seeds = [int(np.random.SeedSequence([*key, row]).generate_state(1)[0]) for row in rows]
        room = max(lengths[row] for row in rows) * 5 // 4 + 8
        found = generate(
            model,
            tokenizer,
            [fitting(model, tokenizer, prefixes[row], room) for row in rows],
            GenerationConfig(room, replace(sampling, seed=seeds)),
            batch_size=batch_size,
        )
        for row, one in zip(rows, found, strict=True):
            texts[row] = one.text
    return texts


def fitting(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prefix: str, room: int) -> str:
    """Return as much of a prefix's end as leaves ``room`` tokens in the model's context.

    Raises:
        ConfigError: the context has no room for anything else.
    """
    limit = context_length(model.config, tokenizer)
    if limit is None:
        return prefix
    if limit <= room + 1:
        raise ConfigError(f"{room} new tokens leave no prefix in a context of {limit}; choose shorter continuations")
    specials = len(text_ids(tokenizer, "a")) - len(text_ids(tokenizer, "a", specials=False))
    return keep_end(tokenizer, prefix, limit - room - specials)
