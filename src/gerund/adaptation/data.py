"""The documents to adapt a model to: read files, hold some out with test queries, make training pairs from the rest.

A document's query is its title, else its first sentence, and the document that is searched lacks it. Which documents
are held out depends on a hash of their text alone, so that it stays the same when others come or go. Or a file of
questions says which documents answer which.

Training pairs are of three kinds: sentences of a document that share a long substring, and the title with such a
sentence (both by ``gerund mine``); and a title or first sentence with chunks of its document, as in a search.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.adaptation.config import (
    LEAST_DOCUMENTS,
    LEAST_PAIRS,
    LEAST_QUERIES,
    MOST_QUERIES,
    MOST_SEARCHED,
    PAIRS,
    TEXTS,
    AdaptConfig,
)
from gerund.data.files import checked_text, field_of, opened
from gerund.data.mining import MiningConfig, mine
from gerund.data.passages import sentence_bounds
from gerund.data.tables import json_lines
from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.jobs.files import atomic_file
from gerund.progress import counted, progress
from gerund.retrieval.document_reader import DocumentReader, ReadLimits, endings, find_files
from gerund.retrieval.documents import Chunk, Chunking, Document
from gerund.retrieval.formats import Section
from gerund.retrieval.indexing import Failure
from gerund.text_analysis import normalized

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel


@dataclass(frozen=True)
class Collected:
    """What was found in files."""

    documents: tuple[Document, ...]  # each text once, in the order of the files
    files: int  # how many files were read
    failed: tuple[Failure, ...]  # those that could not be, or not to their end
    repeated: int  # documents left out since another has the same text

    @property
    def digest(self) -> str:
        """Hash of all documents, by which a resumed run knows them again."""
        content = "".join(f"{document.source}\0{document.digest}\0" for document in self.documents)
        return hashlib.blake2b(content.encode(errors="replace"), digest_size=16).hexdigest()

    @property
    def summary(self) -> str:
        """Say what was read and what was left out.

        >>> Collected((Document("a", "A."),), 2, (Failure("b.txt", "b.txt: there is no text in it"),), 0).summary
        '1 document in 2 files; left out: 1 file that could not be read to its end'
        """
        text = f"{counted(len(self.documents), 'document')} in {counted(self.files, 'file')}"
        skipped = []
        if self.failed:
            its = "their" if len(self.failed) > 1 else "its"
            skipped.append(f"{counted(len(self.failed), 'file')} that could not be read to {its} end")
        if self.repeated:
            skipped.append(f"{self.repeated:,} with the same text as another")
        return f"{text}; left out: {', '.join(skipped)}" if skipped else text


def files_of(paths: Sequence[Path], output: Path | None = None) -> list[Path]:
    """Return the files of documents that there are.

    The output must not be in any of the folders, since it would be read the next time.
    """
    if not paths:
        raise ConfigError("name the files or folders of documents to adapt to (--texts)")
    for path in paths:
        if output is not None and path.is_dir() and output.resolve().is_relative_to(path.resolve()):
            raise ConfigError(f"the output {output} lies in the texts' folder {path}; choose another one")
    files = find_files(paths)
    if not files:
        raise DataError(
            f"{', '.join(map(str, paths))}: there is no file to read; files are read that end in "
            f"{', '.join(f'.{name}' for name in endings())}"
        )
    return files


def read_documents(
    paths: Sequence[Path],
    output: Path | None = None,
    *,
    show: bool | None = None,
    limits: ReadLimits | None = None,
) -> Collected:
    """Read files and folders of documents."""
    files = files_of(paths, output)
    documents: dict[str, Document] = {}
    failed, repeated = list[Failure](), 0
    with progress(len(files), "reading", show=show) as advance, DocumentReader(limits) as reader:
        for path in files:
            name = name_of(path)
            try:
                for parsed in reader.read(path):
                    source = f"{name}#{parsed.key}" if parsed.key else name
                    # A title that only the file's name would give is none: nobody asks by it.
                    document = Document(source, parsed.text, parsed.title.strip(), parsed.sections, name)
                    key = hashlib.blake2b(" ".join(document.text.split()).encode(errors="replace")).hexdigest()
                    repeated += key in documents
                    documents.setdefault(key, document)
            except (DataError, MissingDependencyError) as error:
                failed.append(Failure(str(path), str(error)))
            advance(1)
    if not documents:
        more = f" (and {len(failed) - 1} more files)" if len(failed) > 1 else ""
        raise DataError(f"no file could be read: {failed[0].reason}{more}")
    return Collected(tuple(documents.values()), len(files), tuple(failed), repeated)


def name_of(path: Path) -> str:
    """Return what a file is called: by its way from the current folder where it lies below it."""
    whole, here = path.resolve(), Path.cwd().resolve()
    return (whole.relative_to(here) if whole.is_relative_to(here) else whole).as_posix()


def read_questions(path: Path, sources: Sequence[str], roots: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Read a .jsonl file with ``question`` and ``source``, a name or a list of names.

    A name is a document's own, as ``gerund index`` calls it; a file may also be called by its way from one of the
    folders of texts, or by its name alone where no other has it; a row is ``FILE#ID``.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    names = _names(sources, roots)
    questions: dict[str, dict[str, None]] = {}
    for where, row in json_lines(path):
        asked, answers = (field_of(row, name, where) for name in ("question", "source"))
        question = _unquoted(checked_text(asked, where, "question"))
        answers = answers if isinstance(answers, list) else [answers]
        for name, value in (("question", question), ("source", answers)):
            if not value:
                raise DataError(f"{where}: {name!r} is empty")
        for answer in answers:
            source = _document(checked_text(answer, where, "source"), names, sources, where)
            questions.setdefault(question, {})[source] = None
    if not questions:
        raise DataError(f"{path}: there is no question in it")
    return {question: tuple(answers) for question, answers in questions.items()}


def _names(sources: Sequence[str], roots: Sequence[str]) -> Mapping[str, set[str]]:
    """Return which documents each name may mean."""
    meanings: dict[str, set[str]] = {}
    for source in sources:
        file, sign, key = source.partition("#")
        below = [PurePosixPath(file).relative_to(root) for root in roots if PurePosixPath(file).is_relative_to(root)]
        for name in {file, PurePosixPath(file).name, *map(str, below)}:
            meanings.setdefault(f"{name}{sign}{key}", set()).add(source)
    return meanings


def _document(name: str, names: Mapping[str, set[str]], sources: Sequence[str], where: str) -> str:
    meant = names.get(name) or names.get(str(PurePosixPath(name)), set())
    if name in meant or len(meant) == 1:
        return name if name in meant else next(iter(meant))
    if meant:
        raise DataError(f"{where}: the source {name!r} may be any of {', '.join(sorted(meant)[:3])}; name it whole")
    raise DataError(f"{where}: no document is called {name!r}; the first one is called {sources[0]!r}")


TITLE, FIRST_SENTENCE, QUESTION = "title", "first sentence", "question"

# A title that more documents share says nothing about any of them.
_MOST_OF_A_TITLE = 3
_FEWEST_WORDS, _MOST_WORDS = 3, 60
# What is left of a document, in characters, for there to be something to find.
_LEAST_LEFT = 40
_BEGINNING = 4000
_MARKS = re.compile(r"^[\s#*_=>-]+")


@dataclass(frozen=True)
class Query:
    """A query and what answers it."""

    text: str
    sources: tuple[str, ...]  # the names of the documents that answer it
    kind: str  # what it was made of: ``title``, ``first sentence`` or ``question``


@dataclass(frozen=True)
class Split:
    """Documents to train on, and queries to measure on."""

    training: tuple[Document, ...]  # the documents that may be trained on
    held_out: tuple[Document, ...]  # the documents that were held out, without what their queries are made of
    queries: tuple[Query, ...]

    @cached_property
    def corpus(self) -> tuple[Document, ...]:
        """What is searched: all documents, of more than 5,000 a part; without titles, since they are what is asked.

        What answers a query is always among them; others are sampled by a hash of their text.
        """
        answers = {source for query in self.queries for source in query.sources}
        others = [document for document in self.training if document.source not in answers]
        limit = max(MOST_SEARCHED - len(self.held_out) - (len(self.training) - len(others)), 0)
        skipped = {other.source for other in sorted(others, key=lambda other: order_of(other, 0))[limit:]}
        documents = (*self.training, *self.held_out)
        return tuple(replace(document, title="") for document in documents if document.source not in skipped)

    @property
    def digest(self) -> str:
        """Hash of the queries, by which a resumed run knows them again."""
        content = "".join("\0".join((query.text, *query.sources, "")) for query in self.queries)
        return hashlib.blake2b(content.encode(errors="replace"), digest_size=16).hexdigest()

    @cached_property
    def kinds(self) -> dict[str, int]:
        """How many queries there are of each kind."""
        return dict(Counter(query.kind for query in self.queries))

    @property
    def summary(self) -> str:
        """Say what is measured on."""
        parts = [f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in self.kinds.items()]
        text = f"{len(self.held_out):,} documents held out; queries: {' and '.join(parts)}"
        return f"{text}, {self.verbatim} of them word for word in their document" if self.verbatim else text

    @cached_property
    def verbatim(self) -> int:
        """How many queries stand word for word in what answers them, which words find by themselves."""
        texts = {item.source: f" {_plain(item.text)} " for item in (*self.training, *self.held_out)}
        return sum(any(f" {_plain(query.text)} " in texts[name] for name in query.sources) for query in self.queries)


def query_and_rest(document: Document, common: frozenset[str], options: AdaptConfig) -> tuple[Query, Document] | None:
    r"""Return a document's query and the document without it; None where there is nothing to ask or nothing left.

    >>> document = Document("a", "Bread\n\n" + 9 * "It is made of flour. ", "Bread")
    >>> query, rest = query_and_rest(document, frozenset(), AdaptConfig())
    >>> query.text, rest.text.strip()[:20]
    ('Bread', 'It is made of flour.')
    """
    text, title = document.text, " ".join(document.title.split())
    if options.ask == "titles" and title and title not in common and re.search(r"\w{2}", title):
        line = re.match(r"\s*[^\n]*", text)
        begins = line is not None and _plain(line[0]) == _plain(title)
        rest = without_beginning(document, line.end() if begins and line is not None else 0)
        return _query(document, title, TITLE, rest)
    bounds = sentence_bounds(text[:_BEGINNING], options.language)
    if not bounds:
        return None
    start, end = bounds[0]
    sentence = _MARKS.sub("", " ".join(text[start:end].split()))
    if not _FEWEST_WORDS <= _words(sentence) <= _MOST_WORDS:
        return None
    return _query(document, sentence, FIRST_SENTENCE, without_beginning(document, end))


def _query(document: Document, text: str, kind: str, rest: Document) -> tuple[Query, Document] | None:
    text = _unquoted(text)
    return (Query(text, (document.source,), kind), rest) if text and len(rest.text.strip()) >= _LEAST_LEFT else None


def _unquoted(text: str) -> str:
    """Return a query without double quotes: in a search, what they enclose must stand so in a chunk."""
    return " ".join(text.replace('"', " ").split())


def _words(sentence: str) -> int:
    """Return how many words a sentence has; where none are set apart, as in Chinese, of two letters each."""
    return len(sentence.split()) if " " in sentence else len(sentence) // 2


def _plain(text: str) -> str:
    return re.sub(r"\W+", " ", normalized(text)).strip().casefold()


def without_beginning(document: Document, count: int) -> Document:
    """Return a document without its first characters; its sections stay where they are in the text."""
    if not count:
        return document
    moved = [Section(max(section.start - count, 0), section.path) for section in document.sections]
    # Of several that begin in what was taken away, the last one holds what follows.
    sections = {section.start: section for section in moved}
    return replace(document, text=document.text[count:], sections=tuple(sections.values()))


def common_titles(documents: Sequence[Document]) -> frozenset[str]:
    """Return the titles that more than three documents have."""
    times = Counter(" ".join(document.title.split()) for document in documents)
    return frozenset(title for title, count in times.items() if count > _MOST_OF_A_TITLE)


def order_of(document: Document, seed: int) -> bytes:
    """Return a hash of a document's text, by which documents are sampled."""
    return _order(document.text, seed)


def _order(text: str, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}\0{text}".encode(errors="replace"), digest_size=8).digest()


def split_documents(documents: Sequence[Document], options: AdaptConfig, roots: Sequence[str] = ()) -> Split:
    """Hold documents out and derive queries from them, or read the questions of a file."""
    if options.questions is not None:
        return _split_by_questions(documents, options, roots)
    needed = LEAST_QUERIES + LEAST_DOCUMENTS
    if len(documents) < needed:
        raise DataError(
            f"{counted(len(documents), 'document')} are too few to adapt to: {LEAST_QUERIES} are held out to measure "
            f"on and {LEAST_DOCUMENTS} more are needed to train on; give {needed} or more"
        )
    common = common_titles(documents)
    count = min(max(round(options.held_out * len(documents)), LEAST_QUERIES), MOST_QUERIES)
    chosen: dict[str, tuple[Query, Document]] = {}
    for document in sorted(documents, key=lambda document: order_of(document, options.seed)):
        made = query_and_rest(document, common, options)
        if made is not None:
            chosen[document.source] = made
        if len(chosen) == count:
            break
    if len(chosen) < LEAST_QUERIES:
        raise DataError(
            f"only {len(chosen)} of {len(documents):,} documents have a title or a first sentence to ask for them by, "
            f"and some more text; {LEAST_QUERIES} are needed, or a file of --questions"
        )
    by_title: dict[str, list[str]] = {}
    for document in documents:
        by_title.setdefault(" ".join(document.title.split()), []).append(document.source)
    queries: dict[str, Query] = {}
    for source, (query, rest) in chosen.items():
        answers = by_title[" ".join(rest.title.split())] if query.kind == TITLE else [source]
        # Two documents of one title are one query, which either answers.
        queries.setdefault(query.text, replace(query, sources=tuple(answers)))
    training = tuple(document for document in documents if document.source not in chosen)
    return _checked(Split(training, tuple(rest for _, rest in chosen.values()), tuple(queries.values())))


def _split_by_questions(documents: Sequence[Document], options: AdaptConfig, roots: Sequence[str]) -> Split:
    assert options.questions is not None
    questions = read_questions(Path(options.questions), [document.source for document in documents], roots)
    if len(questions) < LEAST_QUERIES:
        raise DataError(
            f"{options.questions}: {len(questions)} different questions are too few to measure on; {LEAST_QUERIES} or "
            "more are needed"
        )
    chosen = sorted(questions, key=lambda question: _order(question, options.seed))[:MOST_QUERIES]
    answers = {source for question in chosen for source in questions[question]}
    queries = [Query(question, questions[question], QUESTION) for question in chosen]
    training = tuple(document for document in documents if document.source not in answers)
    held_out = tuple(document for document in documents if document.source in answers)
    return _checked(Split(training, held_out, tuple(queries)))


def _checked(split: Split) -> Split:
    if len(split.training) < LEAST_DOCUMENTS:
        raise DataError(
            f"{counted(len(split.training), 'document')} are left to train on when those of the queries are held out; "
            f"{LEAST_DOCUMENTS} are needed: give more documents, or fewer questions"
        )
    return split


# Chunks of a document that are paired with what it is asked by.
_CHUNKS = 4
# Bytes of a sentence by which a document can be told; in Chinese these are eight characters.
_TELLING = 24
# Documents in which a sentence may stand and still be of one: what more of them have is a phrase of their kind.
_VERSIONS = 5
# Characters of what was held out in which each text is searched for. In more of them that would take minutes, and only
# whole sentences are compared.
_SEARCHED = 4 * 2**20
# What one process mines in seconds; starting others takes longer.
_SMALL = 16 * 2**20


@dataclass(frozen=True)
class Pairs:
    """What there is to train on."""

    sentences: int  # pairs of sentences that share a long substring
    titles: int  # pairs of a title, or a first sentence, with such a sentence
    chunks: int  # pairs of a title or a first sentence with a chunk
    left_out: int  # pairs that were dropped since the documents that were held out have a sentence of theirs, too
    questions: int = 0  # pairs of a question that the model wrote and a chunk
    written: int = 0  # how many questions it wrote, those included that do not find their document

    @property
    def count(self) -> int:
        """How many pairs there are."""
        return self.sentences + self.titles + self.chunks + self.questions

    @property
    def summary(self) -> str:
        """Say what there is to train on.

        >>> Pairs(1200, 300, 2000, 0).summary
        '3,500 pairs: 2,000 of a title or first sentence and a chunk, 300 and a sentence, 1,200 of two sentences'
        """
        chunks = f"{self.chunks:,} of a title or first sentence and a chunk"
        if self.written:
            asked = f"{self.questions:,} of a question and a chunk ({self.written:,} questions were written)"
            return f"{self.count:,} pairs with hard negatives: {asked}, {chunks}"
        return f"{self.count:,} pairs: {chunks}, {self.titles:,} and a sentence, {self.sentences:,} of two sentences"


def make_pairs(
    split: Split,
    folder: Path,
    options: AdaptConfig,
    lm: "LanguageModel",
    *,
    show: bool | None = None,
) -> Pairs:
    """Write the pairs of the documents to train on, and these documents themselves."""
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / TEXTS) as file:
        for document in split.training:
            file.write(_line({"title": document.title, "text": document.text}))
    asked = 0
    if options.write_questions:
        kinds, asked = _pairs_with_negatives(split.training, lm, options, show)
    else:
        by_kind = {"sentences": _mined(folder, "all", options, show), "titles": _mined(folder, "title", options, show)}
        by_kind["chunks"] = [(text, chunk.text) for text, chunk in chunk_pairs(split.training, lm, options)]
        kinds = {kind: [(a, b, ()) for a, b in members] for kind, members in by_kind.items()}
    leaks = leak_finder(split, options.language)
    counts, left_out = dict.fromkeys(("sentences", "titles", "chunks", *kinds), 0), 0
    written: set[tuple[str, str]] = set()
    with atomic_file(folder / PAIRS) as file:
        for kind, members in kinds.items():
            for query, text, negatives in members:
                if any(map(leaks, (query, text, *negatives))):
                    left_out += 1
                elif (query, text) not in written:
                    written.add((query, text))
                    row = {"text_a": query, "text_b": text, "kind": kind}
                    file.write(_line(row | ({"negatives": negatives} if negatives else {})))
                    counts[kind] += 1
    pairs = Pairs(**counts, left_out=left_out, written=asked)
    if pairs.count < LEAST_PAIRS:
        raise DataError(
            f"{len(split.training):,} documents make {pairs.count} pairs, and {LEAST_PAIRS} are needed to train: "
            "give more documents, or longer ones"
        )
    return pairs


# A query, the chunk that answers it, and chunks that do not.
_Triple = tuple[str, str, tuple[str, ...]]


def _pairs_with_negatives(
    documents: Sequence[Document], lm: "LanguageModel", options: AdaptConfig, show: bool | None
) -> tuple[dict[str, list[_Triple]], int]:
    """Return questions of the model, titles and first sentences with chunks; and how many questions were written."""
    from gerund.retrieval.questions import Passage, index_of, mined, write_questions

    chunking = chunking_for(lm, options.language)
    by_title = [(text, Passage(chunk.text, chunk.source)) for text, chunk in chunk_pairs(documents, lm, options)]
    passages = list(dict.fromkeys(passage for _, passage in by_title))
    index = index_of(lm, documents, chunking, show=show)
    questions = write_questions(lm, passages, index, seed=options.seed, show=show)
    if not questions.kept:
        raise DataError(
            f"the model wrote {questions.written} questions to {len(passages):,} passages, and no search by them finds "
            "the passage: take an instruction-tuned model, such as smollm2, or leave out --write-questions"
        )
    kinds = {"questions": questions.kept, "chunks": mined(index, by_title)}
    triples = {
        kind: [(triple.question, triple.passage, triple.negatives) for triple in group] for kind, group in kinds.items()
    }
    return triples, questions.written


def chunking_for(lm: "LanguageModel", language: str) -> Chunking:
    """Return how documents are cut: as by default, and smaller for a model that reads less at a time."""
    usual = Chunking(language=language)
    return usual if lm.max_length is None else replace(usual, tokens=max(1, min(usual.tokens, lm.max_length // 2)))


def chunk_pairs(
    documents: Sequence[Document], lm: "LanguageModel", options: AdaptConfig
) -> Iterator[tuple[str, Chunk]]:
    """Yield what a document is asked by with some of its chunks: titles and first sentences are made as for queries."""
    from gerund.retrieval.documents import cut  # with transformers; files are looked at before that

    common, chunking = common_titles(documents), chunking_for(lm, options.language)
    for document in documents:
        made = query_and_rest(document, common, options)
        if made is None:
            continue
        query, rest = made
        chunks = cut(rest, lm.tokenizer, chunking)
        rng = np.random.default_rng(int.from_bytes(order_of(document, options.seed), "little"))
        # The first one always: it says most often what the document is about.
        others = (rng.permutation(max(len(chunks) - 1, 0))[: _CHUNKS - 1] + 1).tolist()
        yield from ((query.text, chunks[place]) for place in [0, *others][: len(chunks)])


def held_out_texts(split: Split, language: str) -> frozenset[str]:
    """Return the queries and all sentences of the held-out documents, for comparison."""
    texts = {plain(query.text) for query in split.queries}
    for document in split.held_out:
        texts |= _sentences(document.text, language) | {plain(document.text), plain(document.title)}
    return frozenset(texts - {""})


def leak_finder(split: Split, language: str) -> Callable[[str], bool]:
    """Return a function that tells whether a text must not be trained on.

    It must not if it is a query or title of a held-out document, has a sentence of one, is a stretch of one or has all
    of one. Documents that are nearly the same would give the answers away. A sentence that many documents have, such
    as a line on rights, gives nothing away.
    """
    exact = held_out_texts(split, language)
    telling = {text for text in exact if _is_telling(text)}
    sentences = (telling & _sentences(document.text, language) for document in split.training)
    counts = Counter(sentence for group in sentences for sentence in group)
    telling -= {sentence for sentence, count in counts.items() if count > _VERSIONS}
    documents = sorted({plain(document.text) for document in split.held_out} & telling, key=len)
    joined = "\n".join(documents) if sum(map(len, documents)) <= _SEARCHED else ""

    @lru_cache(maxsize=2**16)
    def leaks(text: str) -> bool:
        compared = plain(text)
        if compared in exact or not telling.isdisjoint(_sentences(text, language)):
            return True
        if _is_telling(compared) and compared in joined:
            return True
        return any(item in compared for item in takewhile(lambda item: len(item) <= len(compared), documents))

    return leaks


def _sentences(text: str, language: str) -> set[str]:
    return {plain(text[start:end]) for start, end in sentence_bounds(text, language)}


def _is_telling(text: str) -> bool:
    """Tell whether a text is long enough to be of one document: what is shorter may stand anywhere."""
    return len(text.encode("utf-8", "replace")) >= _TELLING


def plain(text: str) -> str:
    r"""Return a text as it is compared: in its normal form, without a difference in case or white space.

    >>> plain("A  Cat\n sat.")
    'a cat sat.'
    """
    return " ".join(normalized(text).split()).casefold()


def _mined(folder: Path, pairs: str, options: AdaptConfig, show: bool | None) -> list[tuple[str, str]]:
    """Return what the miner finds; nothing where no two sentences share enough."""
    # Long stretches for two sentences of the body, which at 30 share only a common phrase.
    limits: dict[str, Any] = {"per_document": 8}
    if pairs == "all":
        limits = {"threshold": 60, "max_uses": 2, "per_document": 6}
    config = MiningConfig(pairs=pairs, language=options.language, seed=options.seed, **limits)
    texts, output = folder / TEXTS, folder / f"mined-{pairs}.jsonl"
    workers = 1 if texts.stat().st_size < _SMALL else None
    try:
        mine([texts], output, config, workers=workers, force=True, show=show)
    except DataError:
        # The documents are whole: what is missing is a pair.
        return []
    with opened(output) as file:
        rows: list[Mapping[str, Any]] = [json.loads(line) for line in file]
    output.unlink()
    output.with_name(f"mined-{pairs}.errors.jsonl").unlink(missing_ok=True)
    return [(row["text_a"], row["text_b"]) for row in rows]


def _line(row: Mapping[str, Any]) -> bytes:
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", "replace")
