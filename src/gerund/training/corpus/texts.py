"""Training texts: documents tokenised on disk, mixed by weight, and read as single texts or packed blocks.

A token cache is three files. ``KEY.tokens`` holds plain little-endian integers, ``BOS text EOS BOS text EOS ...``;
``KEY.starts.npy`` says where each text begins; ``KEY.json`` is written last: where it exists and agrees, the
others are complete. A corpus is never held in memory whole, neither its text nor its tokens nor the index.

Which text is row ``i`` depends on nothing but the seed and ``i``: that is what makes a resumed training see exactly
what the interrupted one would have.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gerund.data.corpus import clean_text, part_of, read_documents
from gerund.data.files import batched_by_size
from gerund.data.passages import split_sentences
from gerund.errors import ConfigError, DataError, ModelError
from gerund.jobs.checkpoints import InputFiles
from gerund.jobs.files import atomic_file, write_atomic
from gerund.training.objectives.sections import TextConfig
from gerund.training.recipe import Recipe, SourceConfig


@dataclass(frozen=True)
class Sample:
    """What row ``number`` of a training is made of."""

    source: int  # which source
    epoch: int  # how often all items of the source have been read before
    item: int  # which of its items
    shift: int  # a number below ``shifts``, the same for a whole epoch of a source


class Mixture:
    """A fixed order of the items of several sources.

    The items of each source are read in a shuffled order without repetition until none is left; then a new order
    begins. Rows of different sources alternate in a fixed pattern, exactly in proportion to the weights over
    every 1000 rows.

    From ``shifts`` numbers the shift of an epoch is sampled.

    >>> mixture = Mixture([3, 2], [3.0, 1.0], seed=0)
    >>> samples = [mixture.sample(number) for number in range(1000)]
    >>> sum(sample.source == 0 for sample in samples)
    750
    >>> first = [sample.item for sample in samples if sample.source == 0]
    >>> sorted(first[:3]), sorted(first[3:6])
    ([0, 1, 2], [0, 1, 2])
    """

    PERIOD = 1000

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], *, seed: int, shifts: int = 1) -> None:
        self.sizes, self.seed, self.shifts = list(sizes), seed, shifts
        self.pattern = self._pattern(weights)
        chosen = self.pattern[:, None] == np.arange(len(sizes))
        self._rank = np.cumsum(chosen, axis=0) - chosen
        self._per_period = chosen.sum(axis=0)
        self._latest: dict[int, tuple[int, int, np.ndarray]] = {}

    def _pattern(self, weights: Sequence[float]) -> np.ndarray:
        rows = np.array(weights, dtype=float) / sum(weights) * self.PERIOD
        if rows.min() < 0.5:
            least, most = min(weights), sum(weights)
            raise ConfigError(
                f"a source has the weight {least:g} of {most:g} in all, which is less than one text in "
                f"{2 * self.PERIOD:,}; give it more weight, or leave it out"
            )
        counts = np.maximum(np.floor(rows), 1).astype(int)
        counts[counts.argmax()] -= max(0, counts.sum() - self.PERIOD)
        largest_remainders = np.argsort(counts - rows, kind="stable")[: self.PERIOD - counts.sum()]
        counts[largest_remainders] += 1
        pattern = np.repeat(np.arange(len(weights)), counts)
        return np.random.default_rng([self.seed, 0]).permutation(pattern)

    def sample(self, number: int) -> Sample:
        """Return what row ``number``, counted from 0, is made of."""
        if number < 0:
            raise IndexError(number)
        period, place = divmod(number, self.PERIOD)
        source = int(self.pattern[place])
        nth = period * int(self._per_period[source]) + int(self._rank[place, source])
        epoch, position = divmod(nth, self.sizes[source])
        shift, order = self._epoch(source, epoch)
        return Sample(source, epoch, int(order[position]), shift)

    def _epoch(self, source: int, epoch: int) -> tuple[int, np.ndarray]:
        """Return the shift and the order of an epoch; the latest one of each source is kept."""
        latest = self._latest.get(source)
        if latest is None or latest[0] != epoch:
            rng = np.random.default_rng([self.seed, 1, source, epoch])
            latest = (epoch, int(rng.integers(self.shifts)), rng.permutation(self.sizes[source]))
            self._latest[source] = latest
        return latest[1], latest[2]

    def epochs(self, rows: int) -> list[float]:
        """Return how often each source is read by the first ``rows`` rows, on average."""
        sources = zip(self._per_period, self.sizes, strict=True)
        return [float(rows * per_period / self.PERIOD / size) for per_period, size in sources]


Unit = Literal["documents", "sentences"]

# Raised whenever the files change their meaning: it is part of every key, so older caches are never taken up.
_FORMAT = 3
_TEXTS_AT_ONCE, _CHARACTERS_AT_ONCE = 1024, 2**20


@dataclass(frozen=True)
class TokenCache:
    """A tokenised corpus on disk."""

    path: Path  # the file of tokens
    dtype: str  # ``uint16`` or ``uint32``
    tokens: int  # how many there are, special tokens around the texts included
    documents: int  # how many documents they come from
    text_bytes: int  # UTF-8 bytes of the texts, for bits per byte
    texts: int  # how many texts: the documents, or their sentences
    specials_before: int  # how many special tokens precede each text: 1 for BOS, or 0
    specials_after: int  # how many follow each text: 1 for EOS, or 0

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
    tokenizer: PreTrainedTokenizerFast,
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

    ``part`` is as in :func:`gerund.data.corpus.part_of`; of it, at most the first ``limit`` documents are read.
    ``begins`` is called before the work.
    """
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
    result = _read_card(card, target)
    if result is not None:
        return result
    if begins is not None:
        begins()
    corpus = _Corpus(files, clean, text_column, unit, min_words, part_of(part), limit)
    cache = _write(corpus, tokenizer, target)
    fields = {name: value for name, value in asdict(cache).items() if name != "path"}
    write_atomic(card, json.dumps({**fields, "files": [path.name for path in files]}), apart=True)
    return cache


@dataclass
class _Corpus:
    """The texts of a corpus in order; counts on the way how many documents they come from."""

    files: list[Path]
    clean: str
    text_column: str
    unit: Unit
    min_words: int
    part: tuple[int, int]
    limit: int | None
    documents_read: int = 0
    documents_used: int = 0

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
            sentences = split_sentences(text)
            return [text[item.start : item.end] for item in sentences if item.words >= self.min_words]
        return [text] if len(text.split()) >= max(1, self.min_words) else []

    def nothing(self) -> DataError:
        """Return the error for a corpus without usable text."""
        what = "text" if self.unit == "documents" else "sentence"
        least = f" of at least {self.min_words} words" if self.min_words else ""
        names = ", ".join(map(str, self.files))
        return DataError(f"{names}: no usable {what}{least}; documents read that are not blank: {self.documents_read}")


def _write(corpus: _Corpus, tokenizer: PreTrainedTokenizerFast, target: Path) -> TokenCache:
    """Write the tokens and the index of a corpus."""
    # The largest id, not the number of tokens: some vocabularies have gaps.
    dtype = "uint16" if max(tokenizer.get_vocab().values()) < 2**16 else "uint32"
    core = _bare(tokenizer)
    before, after = _specials(tokenizer)
    tokens = texts = text_bytes = 0
    # The tokens take their name first: who finds the starts finds both. Two processes may tokenise the same corpus.
    with atomic_file(_starts_of(target), apart=True) as start_file, atomic_file(target, apart=True) as token_file:
        _write_header(start_file, 0)
        start_file.write(np.zeros(1, "<i8").tobytes())
        for batch in batched_by_size(corpus, len, _CHARACTERS_AT_ONCE, _TEXTS_AT_ONCE):
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


def _write_header(file: BinaryIO, count: int) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": (count,)})


def _starts_of(path: Path) -> Path:
    return path.with_suffix(".starts.npy")


def _specials(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """Return the special tokens before and after each text; see ``tokenize_corpus``."""
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return [] if bos is None or bos == eos else [bos], [] if eos is None else [eos]


def _cache_key(paths: list[Path], tokenizer: PreTrainedTokenizerFast, settings: list[str | int | None]) -> str:
    files = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    content = [_FORMAT, files, settings, _specials(tokenizer), _bare(tokenizer).to_str()]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def _bare(tokenizer: PreTrainedTokenizerFast) -> Tokenizer:
    """Return a copy of the core without the padding and truncation that its last user left switched on.

    A control token that is spelled in a text is text, as it is to ``encode``.
    """
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


class Texts:
    """Texts of one or several sources; row ``i`` is a pure function of the seed and ``i``.

    :class:`Mixture` gives the order. A longer text than ``length`` tokens, special ones not counted, is cut into
    pieces, each a text of its own. ``skipped`` counts the texts below ``min_tokens``; shorter last pieces are left out.
    """

    def __init__(
        self, caches: list[TokenCache], weights: list[float], *, length: int, seed: int, min_tokens: int = 8
    ) -> None:
        if not 1 <= min_tokens <= length:
            raise ConfigError(
                f"texts of {min_tokens} to {length} tokens are impossible; min_tokens must be 1 to length"
            )
        self.length = length
        self._sources = [_Source(cache, length, min_tokens) for cache in caches]
        self.skipped = sum(source.skipped for source in self._sources)
        self._mixture = Mixture([len(source) for source in self._sources], weights, seed=seed)

    def __len__(self) -> int:
        """Return how many different texts there are."""
        return sum(map(len, self._sources))

    def row(self, number: int) -> np.ndarray:
        """Return the token ids of row ``number``, without special tokens, shape (at most length,), int64."""
        sample = self._mixture.sample(number)
        return self._sources[sample.source].text(sample.item)

    def number(self, row: int) -> int:
        """Return which text row ``row`` is: a number below ``len``, the same whenever the text is read."""
        sample = self._mixture.sample(row)
        return sum(map(len, self._sources[: sample.source])) + sample.item

    def tokens_of(self, number: int) -> np.ndarray:
        """Return the token ids of text ``number``, as ``row`` does."""
        for source in self._sources:
            if number < len(source):
                return source.text(number)
            number -= len(source)
        raise IndexError(number)


class _Source:
    def __init__(self, cache: TokenCache, length: int, min_tokens: int) -> None:
        self.length = length
        self.before, self.after = cache.specials_before, cache.specials_after
        self.tokens, self.starts = cache.open(), cache.starts()
        sizes = np.diff(self.starts) - (self.before + self.after)
        full, rest = np.divmod(sizes, length)
        pieces = full + (rest >= min_tokens)
        self.skipped = int((pieces == 0).sum())
        # ends[i]: how many pieces texts 0 to i give together.
        self.ends = np.cumsum(pieces)
        if not len(self):
            raise DataError(
                f"{cache.path}: none of {cache.texts} texts has {min_tokens} tokens; the longest has {sizes.max()}"
            )

    def __len__(self) -> int:
        return int(self.ends[-1])

    def text(self, item: int) -> np.ndarray:
        text = int(np.searchsorted(self.ends, item, side="right"))
        piece = item - (int(self.ends[text - 1]) if text else 0)
        start = int(self.starts[text]) + self.before + piece * self.length
        end = min(start + self.length, int(self.starts[text + 1]) - self.after)
        return self.tokens[start:end].astype(np.int64)


class PackedBlocks:
    """Packed blocks by number; block ``i`` is a pure function of the seed and ``i``.

    Each source is cut into blocks of ``length`` tokens, which are read in a shuffled
    order without repetition until the source is used up; then a new order (and a new place of the first cut) begins.
    """

    def __init__(self, caches: list[TokenCache], weights: list[float], *, length: int, seed: int) -> None:
        self.length = length
        for cache in caches:
            if cache.tokens < 2 * length:
                raise DataError(f"{cache.path}: {cache.tokens} tokens are too few for blocks of {length}")
        self._tokens = [cache.open() for cache in caches]
        # One block fewer than fits: it is the room that shifts the cuts from one epoch to the next.
        blocks = [len(tokens) // length - 1 for tokens in self._tokens]
        self._mixture = Mixture(blocks, weights, seed=seed, shifts=length)

    def row(self, number: int) -> np.ndarray:
        """Return block ``number`` of the whole training, shape (length,)."""
        sample = self._mixture.sample(number)
        start = sample.shift + sample.item * self.length
        return self._tokens[sample.source][start : start + self.length]

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Return blocks ``first`` to ``first + count``, int64 ``(count, length)``."""
        rows = [self.row(number) for number in range(first, first + count)]
        return torch.from_numpy(np.stack(rows).astype(np.int64))

    def epochs(self, rows: int) -> list[float]:
        """Return how often each source is read by the first ``rows`` blocks."""
        return self._mixture.epochs(rows)


class SpreadBlocks:
    """Groups of consecutive blocks from evenly spread places, for a validation that is the same every time.

    A group has ``rows`` blocks; all groups together have at most ``limit`` tokens, but there is at least one group.
    """

    def __init__(self, cache: TokenCache, *, length: int, rows: int, limit: int) -> None:
        self.length, self.group = length, rows
        self._tokens = cache.open()
        self._whole = len(self._tokens) // (rows * length)
        if not self._whole:
            raise DataError(
                f"{cache.path}: {cache.tokens} tokens are too few to validate with {rows} blocks of {length}"
            )
        self._groups = max(1, min(self._whole, limit // (rows * length)))

    def __len__(self) -> int:
        """Return how many blocks there are in all groups."""
        return self._groups * self.group

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Return blocks ``first`` to ``first + count``, int64 ``(count, length)``."""
        starts = [self._start(number) for number in range(first, first + count)]
        cuts = [self._tokens[start : start + self.length].astype(np.int64) for start in starts]
        return torch.from_numpy(np.stack(cuts))

    def _start(self, number: int) -> int:
        group, row = divmod(number, self.group)
        return (self._whole * group // self._groups * self.group + row) * self.length


FILES = "files"
"""Where the summary has files; caches have names of several words."""


class Sources:
    """The recipe's sources, tokenised when they are asked for and kept on the disk."""

    def __init__(
        self, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, report: Callable[[str], None] = lambda _: None
    ) -> None:
        self.recipe, self.tokenizer, self.report = recipe, tokenizer, report
        self.opened: dict[str, TokenCache] = {}
        self.read: dict[str, list[Path]] = {}

    @property
    def cache(self) -> Path:
        """Where tokens are kept, and what objectives make of texts."""
        return cache_folder(self.recipe)

    def texts(self, config: TextConfig, length: int, seed: int) -> Texts:
        """Return training texts of an objective, at most ``length`` tokens each."""
        return self._texts(self._caches(config.sources, config.unit, config.min_words), config, length, seed)

    def validation_texts(self, config: TextConfig, length: int, seed: int) -> Texts | None:
        """Return validation texts of an objective; None where its sources have none."""
        caches = self._caches(config.sources, config.unit, config.min_words, validation=True)
        return self._texts(caches, config, length, seed) if caches else None

    @staticmethod
    def _texts(caches: list[tuple[SourceConfig, TokenCache]], config: TextConfig, length: int, seed: int) -> Texts:
        weights, least = [source.weight for source, _ in caches], min(config.shortest_text, length)
        return Texts([cache for _, cache in caches], weights, length=length, seed=seed, min_tokens=least)

    def blocks(self, names: list[str], length: int, seed: int) -> PackedBlocks:
        """Return packed training blocks of these sources."""
        caches = self._caches(names)
        weights = [source.weight for source, _ in caches]
        return PackedBlocks([cache for _, cache in caches], weights, length=length, seed=seed)

    def validation_blocks(self, names: list[str], length: int, rows: int) -> dict[str, SpreadBlocks]:
        """Return validation blocks of each of these sources that has any, in groups of ``rows``."""
        limit = self.recipe.data.validation_tokens
        return {
            source.name: SpreadBlocks(cache, length=length, rows=rows, limit=limit)
            for source, cache in self._caches(names, validation=True)
        }

    def reads(self, name: str, files: list[Path]) -> None:
        """Take note of files that an objective reads by itself, which the recipe has as ``name``."""
        self.read[name] = files

    def summary(self) -> dict[str, Any]:
        """Return what must agree for a resume: the counts of every cache, and the content of every other file.

        Every file is read once for it, a piece at a time.
        """
        summary: dict[str, Any] = {name: cache.summary() for name, cache in sorted(self.opened.items())}
        if self.read:
            summary[FILES] = {
                name: [sum(path.stat().st_size for path in files), InputFiles(files).digest]
                for name, files in sorted(self.read.items())
            }
        return summary

    def _caches(
        self, names: list[str], unit: Unit = "documents", min_words: int = 0, *, validation: bool = False
    ) -> list[tuple[SourceConfig, TokenCache]]:
        """Return the sources of these names (all for none) that have such files, with their tokens."""
        sources = [source for source in self.recipe.data.sources if not names or source.name in names]
        sources = [source for source in sources if source.validation or not validation]
        return [(source, self._tokens(source, unit, min_words, validation)) for source in sources]

    def _tokens(self, source: SourceConfig, unit: Unit, min_words: int, validation: bool) -> TokenCache:
        use = "validation" if validation else "training"
        name = f"{source.name} {use} {unit} {min_words}"
        if name not in self.opened:
            self.opened[name] = tokenize_corpus(
                existing(self.recipe, source.validation if validation else source.files),
                self.tokenizer,
                self.cache,
                clean=source.clean,
                text_column=source.text_column,
                unit=unit,
                min_words=min_words,
                part="1/1" if validation else source.part,
                limit=None if validation else source.limit,
                begins=lambda: self.report(f"tokenising the {use} {unit} of {source.name}"),
            )
        return self.opened[name]


def existing(recipe: Recipe, files: list[Path], *, texts: bool = True) -> list[Path]:
    """Return the paths of the recipe's files, which hold texts, or pairs or passages."""
    paths = [recipe.data.folder / file for file in files]
    for path in paths:
        if not path.is_file():
            hint = ", and --texts names texts of your own" if texts else ", where such files are looked for"
            raise ConfigError(f"{path}: no such file; data.folder is {str(recipe.data.folder)!r}{hint}")
    return paths


def cache_folder(recipe: Recipe) -> Path:
    """Return where tokens are kept."""
    return recipe.data.cache or recipe.output / "cache"
