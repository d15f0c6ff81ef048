"""Maximum length, prompt and pooling mask of tokenized texts, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.arrays import Array, as_like, as_numpy
from gerund.inference.tokens import Tokens, context_length, placed_ids
from gerund.poolings import pool, pooling_parts
from gerund.settings.encoder import LLM2VEC_CONVENTIONS

if TYPE_CHECKING:
    from gerund.settings.encoder import EncoderConfig
    from gerund.settings.plan import ResolvedPlan


class ReadsTexts:
    """A model that is ready to encode, whatever computes it."""

    if TYPE_CHECKING:  # of the subclasses, which are dataclasses
        model: Any  # its config says the length of the context
        tokenizer: Any
        config: EncoderConfig
        plan: ResolvedPlan
        head: Any  # projects pooled states; None without one
        transform: Any  # what is applied to vectors after that; None without one
        why_no_vectors: str  # why the model encodes no texts; empty where it does

        @property
        def state_width(self) -> int:
            """Size of a hidden state."""

        @property
        def device_type(self) -> str:
            """The kind of device that computes, such as ``cpu``."""

    @property
    def width(self) -> int:
        """Size of a vector."""
        if self.transform is not None:
            return int(self.transform.dimensions)
        return self.state_width * self.config.poolings if self.head is None else int(self.head.settings.dimensions)

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens, prompt and special tokens included."""
        configured = self.config.max_length
        # sentence-transformers sets the tokenizer's limit to that of the folder.
        counts_tokenizer = configured is None or not self.config.follows_sentence_transformers
        limits = (configured, context_length(self.model.config, self.tokenizer if counts_tokenizer else None))
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def read_behind(self) -> int:
        """How many tokens behind a text are pooled in the place of its own; 0 for none."""
        return self.config.generated

    @property
    def room_behind(self) -> int:
        """How many tokens the model reads behind a text."""
        return self.config.generated

    def pool_from(self, tokens: Tokens) -> int:
        """Return the first pooled token: without a prompt that is BOS, unless ``pool_bos`` or the plan excludes it."""
        if self.config.pool_prompt or self.read_behind:
            return 0
        if tokens.text_from > tokens.specials_before or self.config.pool_bos == "never":
            return tokens.text_from
        hides = any(view.hidden for view in self.plan.views)
        return tokens.text_from if hides and self.config.pool_bos == "auto" else 0

    def pool_to(self, tokens: Tokens) -> int:
        """Return the end of the pooled tokens: the end of a template is used for the last token's state only."""
        if self.read_behind:
            return self.read_behind
        reads_end = any(part.reads_end for part in pooling_parts(self.config.pooling))
        reads_end = reads_end or self.config.conventions == LLM2VEC_CONVENTIONS
        if tokens.behind is None or self.config.pool_prompt or reads_end:
            return len(tokens)
        return tokens.behind[0]

    def pooled(self, batch: Sequence[Tokens], hidden_BTD: Array, begin: Array) -> np.ndarray:
        """Return the vectors ``(B, E)`` of a batch, float32; text b begins at ``begin[b]`` in its states."""
        first = begin + as_like(np.array([self.pool_from(text) for text in batch]), begin)
        end = begin + as_like(np.array([self.pool_to(text) for text in batch]), begin)
        place_T = as_like(np.arange(hidden_BTD.shape[1]), begin)
        pooled_BT = (place_T >= first[:, None]) & (place_T < end[:, None])
        before_B = first - begin if self.config.follows_sentence_transformers else None
        vectors_BD = pool(hidden_BTD, pooled_BT, self.config.pooling, before_B)
        if (head := self.head) is not None:
            if self.read_behind:  # tokens of no text
                vectors_BD = head(vectors_BD)
            else:
                ids_BT = as_like(np.array(placed_ids(batch, begin.tolist(), hidden_BTD.shape[1])), begin)
                vectors_BD = head(vectors_BD, ids_BT, pooled_BT)
        array_BE = as_numpy(vectors_BD)
        return array_BE if self.transform is None else self.transform(array_BE)
