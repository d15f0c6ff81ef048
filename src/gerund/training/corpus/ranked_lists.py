"""Ranked lists: a query, documents, and how relevant each is by a teacher; read from files or made of raw texts.

Made of texts, a query is a sentence of one, which asks for its rest, or a question that the model writes to it. BM25
finds other texts like it, and the base model's lift says how relevant each is. Questions and scores are cached as they
are made: an interrupted run continues where it was, and another run on the same texts and model makes none again.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.attention.layouts import decoder_layers
from gerund.data.files import checked_text, field_of
from gerund.data.passages import sentence_bounds
from gerund.data.tables import json_lines
from gerund.errors import ConfigError, DataError
from gerund.inference.generate.reproducibility import evaluation_mode
from gerund.jobs.files import write_atomic
from gerund.language_model import LanguageModel
from gerund.models.hash_files import describe_files
from gerund.models.weights import weight_files
from gerund.progress import progress
from gerund.retrieval.documents import Chunk, Chunking
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.questions import PASSAGES_AT_ONCE, PLACE, questions_to
from gerund.retrieval.store import IndexMetadata, KeywordQuery
from gerund.scoring.query_likelihood import QueryLikelihood, forget
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.training.corpus.texts import Mixture
from gerund.training.processes import process_index
from gerund.training.run_folder import announce

if TYPE_CHECKING:
    from gerund.training.objectives.base import Context
    from gerund.training.objectives.settings import RankedListsConfig

LISTS = "lists.jsonl"
"""The file, in a run's folder, of the lists that were made of texts."""
# Raised whenever questions or scores of the same texts become others.
_FORMAT = 2
# Near the largest number of 32 bits.
_TOO_LARGE = 1e38
_FEWEST_WORDS, _LEAST_LEFT = 4, 40


@dataclass(frozen=True)
class RankedList:
    """A query with documents and how relevant each is, by a teacher."""

    query: str
    documents: list[str]
    scores: list[float]


class ShuffledLists:
    """Lists in shuffled epochs, each with its best document first and ``candidates - 1`` others at random.

    Row ``i`` is a pure function of the seed and ``i``.
    """

    def __init__(self, lists: Sequence[RankedList], candidates: int, *, seed: int) -> None:
        self.lists, self.candidates, self.seed = lists, candidates, seed
        self._order = Mixture([len(lists)], [1.0], seed=seed)

    def __len__(self) -> int:
        """Return how many lists there are."""
        return len(self.lists)

    def row(self, number: int) -> RankedList:
        """Return list ``number`` of the training."""
        ranked = self.lists[self._order.sample(number).item]
        best = int(np.argmax(ranked.scores))
        others = [place for place in range(len(ranked.documents)) if place != best]
        shuffled = np.random.default_rng([self.seed, number]).permutation(others)
        places = [best, *shuffled[: self.candidates - 1].tolist()]
        documents, scores = ([column[place] for place in places] for column in (ranked.documents, ranked.scores))
        return RankedList(ranked.query, documents, scores)


def ranked_lists(context: "Context", config: "RankedListsConfig", length: int) -> list[RankedList]:
    """Return the lists of an objective's files, or made of the recipe's texts of at most ``length`` tokens.

    Raises:
        ConfigError: a list has fewer documents than a step reads.
        DataError: a file is broken, or no query could be made of the texts.
    """
    lists = read_lists(context.files(config.files)) if config.files else _made(context, config, length)
    fewest = min(len(ranked.documents) for ranked in lists)
    if fewest < config.candidates:
        raise ConfigError(
            f"{config.kind}: candidates {config.candidates}, and a list has {fewest} documents; set fewer"
        )
    return lists


def read_lists(paths: Sequence[Path]) -> list[RankedList]:
    """Read lists from .jsonl files, whose lines have ``query``, ``documents`` and ``scores``."""
    lists = [_list(row, where) for path in paths for where, row in json_lines(path)]
    if not lists:
        raise DataError(f"{', '.join(map(str, paths))}: no lists in there")
    return lists


def _list(row: Mapping[str, Any], where: str) -> RankedList:
    query, documents, scores = (field_of(row, name, where) for name in ("query", "documents", "scores"))
    query = checked_text(query, where, "query")
    if not query.strip() or not isinstance(documents, list) or len(documents) < 2:
        raise DataError(f"{where}: a list has a query and two documents at least")
    texts = [checked_text(text, where, "documents") for text in documents]
    if not all(text.strip() for text in texts):
        raise DataError(f"{where}: a document is empty")
    is_listed = isinstance(scores, list) and len(scores) == len(texts)
    if not is_listed or not all(type(score) in (int, float) and abs(score) < _TOO_LARGE for score in scores):
        raise DataError(f"{where}: scores must be {len(texts)} numbers, one for each document")
    return RankedList(query, texts, [float(score) for score in scores])


def _made(context: "Context", config: "RankedListsConfig", length: int) -> list[RankedList]:
    """Return lists of the recipe's texts; a resumed run reads those that were made."""
    texts = context.source.texts(config, length, context.seed(config))
    cache = context.source.cache
    if cache is None:  # a dry run, which reads no text
        return [RankedList(f"query {number}", ["a document " * (length // 4)] * config.candidates,
                           list(range(config.candidates))) for number in range(2)]  # fmt: skip
    path = context.recipe.output / LISTS
    if context.resuming and path.is_file():
        return read_lists([path])
    decode_ids = context.model.tokenizer.decode
    whole = [decode_ids(texts.tokens_of(number).tolist(), skip_special_tokens=True) for number in range(len(texts))]
    lists = _Maker(context, config, [text.strip() for text in whole], cache).lists()
    if process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps(asdict(ranked), ensure_ascii=False) + "\n" for ranked in lists))
    return lists


class _Maker:
    """Makes queries of texts, and has the base model say how relevant texts are to them."""

    def __init__(self, context: "Context", config: "RankedListsConfig", texts: Sequence[str], cache: Path) -> None:
        self.model, self.config, self.texts, self.cache = context.model, config, texts, cache
        self.seed = context.seed(config)
        # Of the lists that are made, each text asks once at most.
        self._order = np.random.default_rng(self.seed).permutation(len(texts)).tolist()
        digest = hashlib.blake2b(digest_size=8)
        for part in (str(_FORMAT), str(self.seed), self._base(), *texts):
            digest.update(f"{len(part)}\0{part}".encode(errors="replace"))
        self._key = digest.hexdigest()

    def lists(self) -> list[RankedList]:
        """Return scored lists: of mined and of written queries, half of each where there are both."""
        count, kind = self.config.lists, self.config.questions
        mined = {"mined": count, "both": count - count // 2}.get(kind, 0)
        adapter = self.model.adapter
        # The base's own adapter, which may be trained further, neither writes nor scores.
        with evaluation_mode(self.model.model), nullcontext() if adapter is None else adapter.disable_adapter():
            asked = [*self._taken(self._mined(), mined), *self._taken(self._written(), count - mined)]
            if not asked:
                raise DataError(
                    f"{self.config.kind}: no text has two sentences, of which one could ask for the other; name lists "
                    "as files"
                    if kind == "mined"
                    else f"{self.config.kind}: the model wrote no question that finds its text by words; take an "
                    "instruction-tuned model, such as smollm2, or questions: mined"
                )
            return self._scored(asked)

    def _base(self) -> str:
        """Return what identifies the weights that write and score: those of the base, without an adapter."""
        source = self.model.source
        if source is None:
            return f"a new model of {len(decoder_layers(self.model.model))} layers"
        return f"{source.name} {describe_files(weight_files(source))}"

    def _taken(self, queries: Iterator[tuple[int, str, str]], count: int) -> Iterator[tuple[str, list[str]]]:
        """Yield that many queries with the text that each was made of and others that BM25 finds."""
        if not count:
            return
        left = count
        for number, query, rest in queries:
            matches = self._store.words(KeywordQuery(query), self.config.candidates)
            others = [chunk.text for chunk, _ in matches if chunk.source != str(number)]
            if len(others) >= self.config.candidates - 1:
                yield query, [rest, *others[: self.config.candidates - 1]]
                left -= 1
                if not left:
                    return

    @cached_property
    def _store(self) -> MemoryStore:
        store = MemoryStore()
        store.create(IndexMetadata("", "", 1, "", Chunking()))
        chunks = [Chunk(str(at), 0, len(text), text, 0, 0, "", "", "", "") for at, text in enumerate(self.texts)]
        store.replace([chunk.source for chunk in chunks], chunks, np.ones((len(chunks), 1), dtype=np.float32))
        return store

    def _mined(self) -> Iterator[tuple[int, str, str]]:
        """Yield a text's number, a sentence of it, and the rest."""
        rng = np.random.default_rng([self.seed, 1])
        for number in self._order:
            text = self.texts[number]
            bounds = sentence_bounds(text)
            usable = [(start, end) for start, end in bounds if len(text[start:end].split()) >= _FEWEST_WORDS]
            if len(bounds) < 2 or not usable:
                continue
            start, end = usable[int(rng.integers(len(usable)))]
            query, rest = " ".join(text[start:end].split()), f"{text[:start]} {text[end:]}".strip()
            if len(rest) >= _LEAST_LEFT:
                yield number, query, rest

    def _written(self) -> Iterator[tuple[int, str, str]]:
        """Yield a text's number, a question that the model wrote to it and by which words find it, and the text."""
        known = _Lines(self.cache / f"questions-{self._key}.jsonl")
        order = [number for number in self._order if len(self.texts[number]) >= _LEAST_LEFT]
        for first in range(0, len(order), PASSAGES_AT_ONCE):
            numbers = order[first : first + PASSAGES_AT_ONCE]
            asked = known.get(first, partial(self._questions, numbers))
            announce(f"{self.config.kind}: questions to {first + len(numbers)} of {len(order)} texts")
            for number, questions in zip(numbers, asked, strict=True):
                for question in questions:
                    best = [chunk.source for chunk, _ in self._store.words(KeywordQuery(question), PLACE)]
                    if str(number) in best:
                        yield number, question, self.texts[number]
                        break

    def _questions(self, numbers: Sequence[int]) -> list[list[str]]:
        lm = LanguageModel(self.model.model, self.model.tokenizer, EncoderConfig(AttentionPlan("causal")))
        return questions_to(lm, [self.texts[at] for at in numbers], self.seed)

    def _scored(self, asked: Sequence[tuple[str, list[str]]]) -> list[RankedList]:
        """Return lists with the lift that each document gives to its query."""
        texts = "\0".join(text for query, documents in asked for text in (query, *documents))
        key = hashlib.blake2b(texts.encode(errors="replace"), digest_size=8).hexdigest()
        known = _Lines(self.cache / f"lists-{self._key}-{key}.jsonl")
        announce(f"{self.config.kind}: {len(asked)} lists of {self.config.candidates} texts are labeled by lift")
        model, tokenizer, lists = self.model.model, self.model.tokenizer, []
        try:
            with progress(len(asked), "labeling", show=None) as advance:
                for place, (query, documents) in enumerate(asked):
                    scores = known.get(place, partial(_lift, model, tokenizer, query, documents))
                    lists.append(RankedList(query, documents, scores))
                    advance(1)
        finally:
            forget(model)
        return lists


def _lift(model: Any, tokenizer: Any, query: str, documents: Sequence[str]) -> list[float]:
    values: list[float] = QueryLikelihood(model, tokenizer, query, "lift")(documents).tolist()
    return values


class _Lines:
    """Results by number, in a file to which each new one is added; an interrupted run, or another one, reads them.

    Two runs may write at the same time: each result is a line ``[number, result]`` of one write, in any order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        content = path.read_bytes() if path.is_file() else b""
        # The end of an interrupted run is no line; the next one begins after it.
        self._torn = bool(content) and not content.endswith(b"\n")
        self._known = dict[int, Any]()
        for line in content.splitlines():
            with suppress(ValueError):
                number, result = json.loads(line)
                self._known[number] = result

    def get(self, number: int, make: Callable[[], Any]) -> Any:
        """Return the result of a number: the one in the file, else a new one."""
        if number not in self._known:
            self._known[number] = make()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(f"{chr(10) * self._torn}{json.dumps([number, self._known[number]])}\n".encode())
            self._torn = False
        return self._known[number]
