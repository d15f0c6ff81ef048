"""Turns documents into a token cache on disk, and the cache into micro-batches of packed blocks.

Knows: token files, blocks, how sources are mixed. Does not know: models, objectives, the trainer.

A cache is ``NAME.tokens`` (plain little-endian integers, ``BOS document EOS BOS document EOS ...``) beside
``NAME.json``, which is written last: where it exists and agrees, the tokens are whole. Item ``i`` of
:class:`PackedBlocks` is the whole micro-batch ``i`` and depends on nothing but the seed and ``i``, which is
what makes a resumed training see exactly what the interrupted one would have seen.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import Dataset

from gerund.data.corpus import clean_text, read_documents
from gerund.data.files import write_whole
from gerund.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

_DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class TokenCache:
    """A tokenised corpus on disk."""

    path: Path
    """The file of tokens."""
    dtype: str
    """``uint16`` or ``uint32``."""
    tokens: int
    """How many there are, BOS and EOS of every document included."""
    documents: int
    """How many documents they come from."""
    text_bytes: int
    """UTF-8 bytes of the cleaned text, for bits per byte."""

    def open(self) -> np.ndarray:
        """Return the tokens as a read-only memory map of shape (tokens,)."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))

    def summary(self) -> list[int]:
        """Return what must agree for a resume: two corpora with the same three counts are the same."""
        return [self.tokens, self.documents, self.text_bytes]


def tokenize_corpus(
    paths: Iterable[str | Path],
    tokenizer: "PreTrainedTokenizerFast",
    folder: str | Path,
    *,
    clean: str = "none",
    text_column: str = "text",
) -> TokenCache:
    """Tokenise files into ``folder``, or return what is there from an earlier time.

    The key is a hash of the files' names, sizes and times, of the tokenizer and of the cleaning, so any
    change makes a new cache. An interrupted call leaves nothing that a later one would take for whole.

    Raises:
        DataError: A file is missing or malformed, or the corpus has no text at all.
    """
    files = [Path(path) for path in paths]
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    key = _cache_key(files, tokenizer, clean, text_column)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    target, card = folder / f"{key}.tokens", folder / f"{key}.json"
    found = _read_card(card, target)
    if found is not None:
        return found
    dtype = "uint16" if len(tokenizer) <= 2**16 else "uint32"
    partial = folder / f"{key}.{os.getpid()}.partial"
    texts = (clean_text(document.text, clean) for document in read_documents(files, text_column=text_column))
    try:
        tokens, documents, text_bytes = _write_tokens(filter(None, texts), tokenizer, partial, dtype)
        if not tokens:
            raise DataError(f"{', '.join(map(str, files))}: no text in there")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    fields = {"dtype": dtype, "tokens": tokens, "documents": documents, "text_bytes": text_bytes}
    write_whole(card, json.dumps({**fields, "files": [path.name for path in files]}))
    return TokenCache(target, dtype, tokens, documents, text_bytes)


def _write_tokens(
    texts: Iterable[str], tokenizer: "PreTrainedTokenizerFast", partial: Path, dtype: str
) -> tuple[int, int, int]:
    """Write the tokens of ``texts``; return how many tokens, documents and bytes of text they are."""
    tokens = documents = text_bytes = 0
    core = _bare(tokenizer)
    before, after = tokenizer.bos_token_id, tokenizer.eos_token_id
    with partial.open("wb") as file:
        for batch in _chunks(texts, _DOCUMENTS_AT_ONCE):
            # encode_batch runs on every core; add_special_tokens=False because BOS and EOS are put here.
            for encoding in core.encode_batch_fast(batch, add_special_tokens=False):
                ids = np.array([before, *encoding.ids, after], dtype=dtype)
                file.write(ids.tobytes())
                tokens += len(ids)
            documents += len(batch)
            text_bytes += sum(len(text.encode("utf-8")) for text in batch)
        file.flush()
        os.fsync(file.fileno())
    return tokens, documents, text_bytes


def _chunks(items: Iterable[str], size: int) -> Iterator[list[str]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk


def _cache_key(paths: list[Path], tokenizer: "PreTrainedTokenizerFast", clean: str, text_column: str) -> str:
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
    content = [1, files, clean, text_column, special, _bare(tokenizer).to_str()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _bare(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """Return a copy of the core without the padding and truncation that its last user left switched on."""
    from tokenizers import Tokenizer

    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.no_padding()
    core.no_truncation()
    return core


def _read_card(card: Path, target: Path) -> TokenCache | None:
    if not (card.is_file() and target.is_file()):
        return None
    fields = json.loads(card.read_text("utf-8"))
    cache = TokenCache(target, fields["dtype"], fields["tokens"], fields["documents"], fields["text_bytes"])
    whole = target.stat().st_size == cache.tokens * np.dtype(cache.dtype).itemsize
    return cache if whole else None


class PackedBlocks(Dataset[dict[str, Any]]):
    """Micro-batches of packed blocks; item ``i`` is a pure function of the seed and ``i``.

    Each source is cut into blocks of ``length`` tokens, which are dealt in a shuffled order without
    repetition until the source is used up; then a new order (and a new place of the first cut) begins.
    Rows of different sources alternate in a fixed pattern, exactly in proportion to the weights over
    every 1000 rows.

    Args:
        caches: The tokens of each source.
        weights: How much of each source, in tokens; they need not sum to one.
        length: Tokens in a block.
        rows: Blocks in a micro-batch.
        items: How many micro-batches the data set claims to have.
        seed: Decides all orders.
    """

    _PERIOD = 1000

    def __init__(
        self, caches: list[TokenCache], weights: list[float], *, length: int, rows: int, items: int, seed: int
    ) -> None:
        self.length, self.rows, self.items, self.seed = length, rows, items, seed
        for cache in caches:
            if cache.tokens < 2 * length:
                raise DataError(f"{cache.path}: {cache.tokens} tokens are too few for blocks of {length}")
        self._tokens = [cache.open() for cache in caches]
        # One block fewer than fits: it is the room that shifts the cuts from one epoch to the next.
        self._blocks = [len(tokens) // length - 1 for tokens in self._tokens]
        self._pattern = self._deal(weights)
        chosen = self._pattern[:, None] == np.arange(len(caches))
        self._rank = np.cumsum(chosen, axis=0) - chosen
        self._per_period = chosen.sum(axis=0)
        self._order: dict[int, tuple[int, int, np.ndarray]] = {}

    def _deal(self, weights: list[float]) -> np.ndarray:
        share = np.array(weights, dtype=float) / sum(weights) * self._PERIOD
        counts = np.floor(share).astype(int)
        largest_remainders = np.argsort(counts - share, kind="stable")[: self._PERIOD - counts.sum()]
        counts[largest_remainders] += 1
        pattern = np.repeat(np.arange(len(weights)), counts)
        return np.random.default_rng([self.seed, 0]).permutation(pattern)

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return micro-batch ``index`` as ``{"input_ids": int64 tensor (rows, length)}``."""
        if not 0 <= index < self.items:
            raise IndexError(index)
        rows = [self._row(index * self.rows + r) for r in range(self.rows)]
        return {"input_ids": torch.from_numpy(np.stack(rows).astype(np.int64))}

    def _row(self, number: int) -> np.ndarray:
        """Return block ``number`` of the whole training, shape (length,)."""
        period, place = divmod(number, self._PERIOD)
        source = int(self._pattern[place])
        nth = period * int(self._per_period[source]) + int(self._rank[place, source])
        epoch, position = divmod(nth, self._blocks[source])
        offset, order = self._epoch(source, epoch)
        start = offset + int(order[position]) * self.length
        return self._tokens[source][start : start + self.length]

    def _epoch(self, source: int, epoch: int) -> tuple[int, np.ndarray]:
        """Return where the first cut lies and the order of the blocks; the latest epoch is kept."""
        kept = self._order.get(source)
        if kept is None or kept[0] != epoch:
            rng = np.random.default_rng([self.seed, 1, source, epoch])
            kept = (epoch, int(rng.integers(self.length)), rng.permutation(self._blocks[source]))
            self._order[source] = kept
        return kept[1], kept[2]

    def epochs(self) -> list[float]:
        """Return how often each source is read by all micro-batches together."""
        rows = self.items * self.rows
        share = zip(self._per_period, self._blocks, strict=True)
        return [float(rows * per_period / self._PERIOD / blocks) for per_period, blocks in share]


def validation_blocks(cache: TokenCache, *, length: int, rows: int, limit: int) -> list[dict[str, Any]]:
    """Return micro-batches of consecutive blocks from evenly spread places, at most ``limit`` tokens."""
    tokens = cache.open()
    whole = len(tokens) // (rows * length)
    if not whole:
        raise DataError(f"{cache.path}: {len(tokens)} tokens are too few to validate with {rows} blocks of {length}")
    wanted = max(1, min(whole, limit // (rows * length)))
    starts = [whole * i // wanted * rows * length for i in range(wanted)]
    cuts = (tokens[start : start + rows * length].astype(np.int64) for start in starts)
    return [{"input_ids": torch.from_numpy(cut.reshape(rows, length))} for cut in cuts]
