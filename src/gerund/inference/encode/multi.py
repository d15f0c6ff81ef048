"""Token vectors for late interaction: the states of a text's tokens, projected, pooled and normalized.

Pooling takes the mean of neighboring tokens (Clavié et al. 2024, "Reducing the Footprint of Multi-Vector Retrieval
with Minimal Performance Impact via Token Pooling", sequential pooling). In 8 bits each vector is divided by its
largest number: its direction is all that counts.

Shapes: T tokens, D dimensions of a state, E of a token vector. Imports no torch.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.arrays import Array, as_float32, as_numpy
from gerund.inference.encode.batches import Encodes, demand_own_states, in_batches
from gerund.inference.encode.texts import text_tokens
from gerund.inference.tokens import Empty, Overflow, Tokens
from gerund.models.kinds import packed_network
from gerund.models.vectors import unit
from gerund.settings.encoder import METHODS, LateConfig, TokenPrecision
from gerund.settings.templates import LAST_LAYER, PromptText

if TYPE_CHECKING:
    from gerund.models.heads import LateHead

_STEPS = 127
# Methods without training that tokens are read with too.
_KEPT = ("exit_layer", "pool_bos", "text_normalization")


class TokenReader:
    """Reads queries and documents for their token vectors.

    Args:
        runtime: the model and how it is read; its plan and adapter are kept.
        config: markers and layers.
        head: the projection; None leaves states as they are.
    """

    def __init__(self, runtime: Encodes, config: LateConfig, head: "LateHead | None" = None) -> None:
        once = {name: usual for name, usual in METHODS.items() if name not in _KEPT}
        layers = config.layers if packed_network(runtime.model) is None else LAST_LAYER
        late_config = replace(runtime.config, **{**once, "layers": layers})  # type: ignore[arg-type]
        plain: Any = runtime
        self.runtime = replace(plain, config=late_config, head=None, transform=None)
        if layers != LAST_LAYER:
            self.runtime = replace(self.runtime, sends_plan=True)
        self.config, self._head = config, head
        self._special = set(runtime.tokenizer.all_special_ids) if config.counts == "text" else set[int]()
        known = runtime.tokenizer.get_vocab() if config.skipped else {}
        self._skipped = {known[token] for token in config.skipped if token in known}

    @property
    def dimensions(self) -> int:
        """Dimensions of a token vector."""
        return self.runtime.state_width if self._head is None else self._head.dimensions

    @property
    def fingerprint(self) -> str:
        """Hash of what token vectors depend on besides the encoder."""
        settings = json.dumps({**self.config.to_dict(), "layers": self.runtime.config.layers}, sort_keys=True)
        head = "" if self._head is None else self._head.fingerprint
        return hashlib.blake2b(f"{settings}{head}".encode(), digest_size=8).hexdigest()

    def tokens(
        self,
        texts: Sequence[str],
        *,
        is_query: bool,
        empty: Empty = "error",
        overflow: Overflow = "truncate",
        warn: bool = True,
    ) -> list[Tokens | None]:
        """Return texts as they are read; None for an empty one. ``warn`` about texts that are truncated."""
        marker = PromptText(self.config.query if is_query else self.config.document)
        length = self.config.query_length if is_query else self.config.document_length
        runtime = self.runtime
        if length is not None and (runtime.max_length is None or length < runtime.max_length):
            runtime = replace(runtime, config=replace(runtime.config, max_length=length))
        tokens = text_tokens(runtime, texts, marker, empty, overflow, warn=warn)
        if is_query or not self._skipped:
            return tokens
        return [None if text is None else _Document(**vars(text), skipped=frozenset(self._skipped)) for text in tokens]

    def own_places(self, text: Tokens) -> list[int]:
        """Return where the tokens of a text stand that have vectors.

        Those of its marker and special tokens have none, unless the settings count all.
        """
        end = len(text) if text.behind is None else text.behind[0]
        places = range(len(text)) if self.config.counts == "all" else range(text.text_from, end)
        without = self._special | text.skipped if isinstance(text, _Document) else self._special
        return [place for place in places if text.ids[place] not in without]

    def ids(self, text: Tokens | None) -> list[int]:
        """Return a text's own tokens."""
        return [] if text is None else [text.ids[place] for place in self.own_places(text)]

    def vectors(
        self,
        texts: Sequence[Tokens | None],
        *,
        pool_factor: int = 1,
        batch_tokens: int | None = None,
        show: bool | None = False,
    ) -> list[np.ndarray]:
        """Return the token vectors ``(T, E)`` float32 of each text, of length 1; none for None."""
        demand_own_states(self.runtime)
        vectors = [np.zeros((0, self.dimensions), dtype=np.float32) for _ in texts]

        def keep(rows: list[int], batch: list[Tokens], hidden_BTD: Array, begin: Array) -> None:
            for row, text, hidden_TD, start in zip(rows, batch, hidden_BTD, begin.tolist(), strict=True):
                places = [start + place for place in self.own_places(text)]
                vectors[row] = self._projected(as_numpy(as_float32(hidden_TD[places])), pool_factor)

        in_batches(self.runtime, texts, self.runtime.states, keep, batch_tokens=batch_tokens, show=show)
        return vectors

    def _projected(self, states_TD: np.ndarray, pool_factor: int) -> np.ndarray:
        vectors_TE = states_TD if self._head is None else states_TD @ self._head.projection_ED.T
        vectors_TE = unit(vectors_TE)
        return vectors_TE if pool_factor == 1 else unit(pooled(vectors_TE, pool_factor))


@dataclass(frozen=True)
class _Document(Tokens):
    """The tokens of a document, of which some have no vectors."""

    skipped: frozenset[int] = frozenset()


def pooled(vectors_TE: np.ndarray, factor: int) -> np.ndarray:
    """Return the means of ``factor`` neighbors each; the last one may be of fewer.

    >>> pooled(np.array([[2.0], [4.0], [5.0]]), 2).tolist()
    [[3.0], [5.0]]
    """
    if not len(vectors_TE):
        return vectors_TE
    starts = np.arange(0, len(vectors_TE), factor)
    counts = np.diff([*starts, len(vectors_TE)])
    means_SE: np.ndarray = np.add.reduceat(vectors_TE, starts, axis=0) / counts[:, None]
    return means_SE.astype(vectors_TE.dtype)


def rounded(vectors_TE: np.ndarray, precision: TokenPrecision) -> np.ndarray:
    """Return vectors in fewer bits; in 8 bits each one is divided by its largest number first.

    >>> rounded(np.array([[0.5, -0.25], [0.0, 0.0]], dtype=np.float32), "int8").tolist()
    [[127, -64], [0, 0]]
    """
    if precision != "int8":
        return vectors_TE.astype(precision)
    largest_T1 = np.abs(vectors_TE).max(axis=1, keepdims=True, initial=0)
    scaled_TE = vectors_TE * (_STEPS / np.where(largest_T1 > 0, largest_T1, 1))
    return np.rint(scaled_TE).astype(np.int8)
