"""Turns documents into a token cache on disk.

Knows: token files, which special tokens stand around a text, when a cache is whole. Does not know: blocks, how
sources are mixed, models.

A cache is three files. ``KEY.tokens`` holds plain little-endian integers, ``BOS text EOS BOS text EOS ...``;
``KEY.starts.npy`` says where each text begins; ``KEY.json`` is written last: where it exists and agrees, the
others are whole. A corpus is never held in memory whole, neither its text nor its tokens nor the index.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Literal, get_args

import numpy as np

from gerund.data.cleaning import clean_text
from gerund.data.corpus import part_of, read_documents
from gerund.data.passages import split_sentences
from gerund.errors import ConfigError, DataError, ModelError, unknown_name
from gerund.jobs.files import whole_file, write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Unit = Literal["documents", "sentences"]

# Raised whenever the files change their meaning: it is part of every key, so older caches are never taken up.
_FORMAT = 3
_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 1024, 2**20


@dataclass(frozen=True)
class TokenCache:
    """A tokenised corpus on disk."""

    path: Path
    """The file of tokens."""
    dtype: str
    """``uint16`` or ``uint32``."""
    tokens: int
    """How many there are, special tokens around the texts included."""
    documents: int
    """How many documents they come from."""
    text_bytes: int
    """UTF-8 bytes of the texts, for bits per byte."""
    texts: int
    """How many texts: the documents, or their sentences."""
    specials_before: int
    """How many special tokens precede each text: 1 for BOS, or 0."""
    specials_after: int
    """How many follow each text: 1 for EOS, or 0."""

    def open(self) -> np.ndarray:
        """Return the tokens as a read-only memory map of shape (tokens,)."""
        return np.memmap(self.path, dtype=self.dtype, mode="r", shape=(self.tokens,))

    def starts(self) -> np.ndarray:
        """Return where each text begins, its BOS included, as a read-only memory map of shape (texts + 1,).

        The last number is where the last text ends: text ``i`` is ``open()[starts()[i] : starts()[i + 1]]``.
        """
        starts: np.ndarray = np.load(_starts_of(self.path), mmap_mode="r", allow_pickle=False)
        return starts

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
    unit: Unit = "documents",
    min_words: int = 0,
    part: str = "1/1",
    limit: int | None = None,
    begins: Callable[[], None] | None = None,
) -> TokenCache:
    """Tokenise files into ``folder``, or return what is there from an earlier time.

    The key is a hash of the files' names, sizes and times, of the tokenizer and of the other settings, so any
    change makes a new cache. An interrupted call leaves nothing that a later one would take for whole.

    BOS precedes and EOS follows each text; what the tokenizer lacks is left out. Where both are one token
    (GPT-2, GPT-NeoX, OPT) it only follows: those models were trained with one between two documents.

    Args:
        paths: The files; see :func:`gerund.data.corpus.read_documents`.
        tokenizer: A fast tokenizer.
        folder: Where caches lie; made if need be.
        clean: Known quirks to remove; see :func:`gerund.data.cleaning.clean_text`.
        text_column: Column or field that holds the text.
        unit: What counts as a text of its own: whole ``documents``, or each of their ``sentences``.
        min_words: Texts of fewer words are left out. (MAGNET, Appendix A: lines of more than 20 words.)
        part: Which documents; see :func:`gerund.data.corpus.part_of`.
        limit: Read only so many documents of the part, the first; None reads all.
        begins: Called where nothing is there yet and the work begins.

    Raises:
        ConfigError: An unknown unit or cleaning, or a negative ``min_words``.
        ModelError: The tokenizer is not a fast one.
        DataError: A file is missing or malformed, or nothing in the corpus is usable text.
        ResourceError: The disk is full or refuses; nothing is left behind.
    """
    if unit not in get_args(Unit):
        raise unknown_name("unit", unit, list(get_args(Unit)))
    if min_words < 0:
        raise ConfigError(f"min_words must not be negative, and is {min_words}")
    if not tokenizer.is_fast:
        raise ModelError("training needs a fast tokenizer (tokenizer.json), and this one is none")
    files = [Path(path) for path in paths]
    for path in files:
        if not path.is_file():
            raise DataError(f"{path}: no such file")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    settings = [clean, text_column, unit, min_words, limit, *([part] if part != "1/1" else [])]
    target = folder / f"{_cache_key(files, tokenizer, settings)}.tokens"
    card = target.with_suffix(".json")
    found = _read_card(card, target)
    if found is not None:
        return found
    if begins is not None:
        begins()
    corpus = _Corpus(
        files, clean=clean, text_column=text_column, unit=unit, min_words=min_words, limit=limit, part=part_of(part)
    )
    cache = _write(corpus, tokenizer, target)
    fields = {name: value for name, value in asdict(cache).items() if name != "path"}
    write_whole(card, json.dumps({**fields, "files": [path.name for path in files]}))
    return cache


class _Corpus:
    """The texts of a corpus in order; counts on the way how many documents they come from."""

    def __init__(
        self,
        files: list[Path],
        *,
        clean: str,
        text_column: str,
        unit: Unit,
        min_words: int,
        part: tuple[int, int],
        limit: int | None,
    ) -> None:
        self.files, self.clean, self.text_column = files, clean, text_column
        self.unit, self.min_words, self.limit, self.part = unit, min_words, limit, part
        self.documents_read = self.documents_used = 0

    def __iter__(self) -> Iterator[str]:
        first, step = self.part
        documents = islice(read_documents(self.files, text_column=self.text_column), first, None, step)
        for document in islice(documents, self.limit):
            self.documents_read += 1
            texts = self._texts(clean_text(document.text, self.clean))
            self.documents_used += bool(texts)
            yield from texts

    def _texts(self, text: str) -> list[str]:
        if self.unit == "sentences":
            found = split_sentences(text)
            return [text[one.start : one.end] for one in found if one.words >= self.min_words]
        return [text] if len(text.split()) >= max(1, self.min_words) else []

    def nothing(self) -> DataError:
        """Return the error for a corpus without usable text."""
        what = "text" if self.unit == "documents" else "sentence"
        least = f" of at least {self.min_words} words" if self.min_words else ""
        names = ", ".join(map(str, self.files))
        return DataError(f"{names}: no usable {what}{least}; documents read that are not blank: {self.documents_read}")


def _write(corpus: _Corpus, tokenizer: "PreTrainedTokenizerFast", target: Path) -> TokenCache:
    """Write the tokens and the index of a corpus."""
    core, dtype = _bare(tokenizer), _dtype_of(tokenizer)
    before, after = _specials(tokenizer)
    tokens = texts = text_bytes = 0
    # The tokens take their name first: who finds the starts finds both. Two processes may tokenise the same corpus.
    with whole_file(_starts_of(target), apart=True) as start_file, whole_file(target, apart=True) as token_file:
        _write_header(start_file, 0)
        start_file.write(np.zeros(1, "<i8").tobytes())
        for batch in _batches(corpus):
            # encode_batch runs on every core; add_special_tokens=False because BOS and EOS are put here.
            encodings = core.encode_batch_fast(batch, add_special_tokens=False)
            pieces = [np.array([*before, *encoding.ids, *after], dtype=dtype) for encoding in encodings]
            for piece in pieces:
                token_file.write(piece.tobytes())
            ends = list(accumulate(map(len, pieces), initial=tokens))[1:]
            start_file.write(np.array(ends, "<i8").tobytes())
            tokens, texts = ends[-1], texts + len(batch)
            text_bytes += sum(len(text.encode("utf-8")) for text in batch)
        if not tokens:
            raise corpus.nothing()
        # numpy leaves room in its header for any number, so the right one has the same length.
        start_file.seek(0)
        _write_header(start_file, texts + 1)
    return TokenCache(target, dtype, tokens, corpus.documents_used, text_bytes, texts, len(before), len(after))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == _TEXTS_AT_ONCE or characters >= _CHARACTERS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write_header(file: BinaryIO, count: int) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (count,)})


def _starts_of(path: Path) -> Path:
    return path.with_suffix(".starts.npy")


def _specials(tokenizer: "PreTrainedTokenizerFast") -> tuple[list[int], list[int]]:
    """Return the special tokens before and after each text; see ``tokenize_corpus``."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [] if bos is None or bos == eos else [bos], [] if eos is None else [eos]


def _dtype_of(tokenizer: "PreTrainedTokenizerFast") -> str:
    # The largest id, not the number of tokens: some vocabularies have gaps.
    return "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"


def _cache_key(paths: list[Path], tokenizer: "PreTrainedTokenizerFast", settings: list[str | int | None]) -> str:
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    content = [_FORMAT, files, settings, _specials(tokenizer), _bare(tokenizer).to_str()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _bare(tokenizer: "PreTrainedTokenizerFast") -> "Tokenizer":
    """Return a copy of the core without the padding and truncation that its last user left switched on.

    A control token that is spelled in a text is text, as it is to ``encode``.
    """
    from tokenizers import Tokenizer

    core = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    core.no_padding()
    core.no_truncation()
    core.encode_special_tokens = True
    return core


def _read_card(card: Path, target: Path) -> TokenCache | None:
    """Return the cache that a card describes, if its files are there and whole."""
    if not (card.is_file() and target.is_file() and _starts_of(target).is_file()):
        return None
    fields = json.loads(card.read_text("utf-8"))
    del fields["files"]
    cache = TokenCache(target, **fields)
    if target.stat().st_size != cache.tokens * np.dtype(cache.dtype).itemsize:
        return None
    try:
        starts = cache.starts()
    except (ValueError, EOFError, OSError):  # an index that is cut short or empty
        return None
    return cache if starts.shape == (cache.texts + 1,) and starts[-1] == cache.tokens else None
