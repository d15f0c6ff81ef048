"""Read evaluation data: rows, labelled texts, rated pairs, corpora and multiple-choice questions.

Every error names the file and the line. Collections of documents, queries and relevance judgements are in the layout of
BEIR (Thakur et al., 2021)::

    corpus.jsonl            {"_id": ..., "title": ..., "text": ...}      title is optional
    queries.jsonl           {"_id": ..., "text": ...}
    qrels/test.tsv          query-id <tab> corpus-id <tab> score, with a header; dev.tsv for validation
    candidates/test.tsv     query-id <tab> corpus-id, with a header: documents to be re-ranked (optional)
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from gerund.data.corpus import FORMATS, Document, clean_text, read_documents
from gerund.data.files import checked_text, decode, field_of, filled_text, finite_number, json_row, opened
from gerund.errors import DataError

ENDINGS = (".jsonl", ".jsonl.xz", ".jsonl.gz")
CORPORA_FOLDER = "lm"
CHOICES_FOLDER = "suffix"
AUTO = "auto"
# What published sets call a split; the first file that is there counts.
_SPLITS = {"train": ("train",), "validation": ("valid", "validation", "dev"), "test": ("test",)}
_MOST_NAMED = 10
# Which cleaning a corpus needs, by what stands in its file name: enwiki and books, but no notebooks.
_STYLES = {"wiki": "wikipedia", "(?<![a-z])book": "gutenberg"}
_CORPUS_NAME = re.compile(rf"(?P<name>.+)\.(?P<split>test|valid)(?:{'|'.join(map(re.escape, FORMATS))})")


@dataclass(frozen=True)
class Row:
    """One row; ``where`` is its ``FILE, line N`` for messages. All getters raise a ``DataError`` that names it."""

    where: str
    values: Mapping[str, Any]

    def text(self, name: str) -> str:
        """Return a text field."""
        return checked_text(field_of(self.values, name, self.where), self.where, name)

    def label(self, name: str) -> str:
        """Return a class as text; the file may have a text or a whole number."""
        value = field_of(self.values, name, self.where)
        if isinstance(value, int) and not isinstance(value, bool):
            return str(value)
        return filled_text(value, self.where, name)

    def number(self, name: str) -> float:
        """Return a finite number."""
        return finite_number(field_of(self.values, name, self.where), self.where, name)


def read_json_lines(path: Path, *, limit: int | None = None) -> list[Row]:
    """Return the first ``limit`` rows of a .jsonl file (or .jsonl.xz, .jsonl.gz); blank lines are skipped."""
    return _not_empty([Row(where, json_row(line, where)) for where, line in islice(_lines(path), limit)], path)


def read_tab_lines(path: Path, names: tuple[str, ...]) -> list[Row]:
    """Return the rows of a file with exactly these tab-separated fields, without quoting."""
    rows = []
    for where, line in _lines(path):
        fields = line.rstrip("\r\n").split("\t")
        if len(fields) != len(names):
            raise DataError(f"{where}: expected {len(names)} fields ({', '.join(names)}), found {len(fields)}")
        rows.append(Row(where, dict(zip(names, fields, strict=True))))
    return _not_empty(rows, path)


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    if not path.is_file():
        raise DataError(f"{path} is a folder, not a file" if path.is_dir() else f"{path}: no such file")
    with opened(path) as file:
        for number, raw in enumerate(file, start=1):
            where = f"{path}, line {number}"
            line = decode(raw, where)
            line = line.lstrip("\ufeff") if number == 1 else line
            if line.strip():
                yield where, line


def _not_empty(rows: list[Row], path: Path) -> list[Row]:
    if not rows:
        raise DataError(f"{path}: the file is empty")
    return rows


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with a class each."""

    texts: list[str]
    labels: list[str]

    def take(self, rows: list[int]) -> "LabelledTexts":
        """Return the texts of some rows."""
        return LabelledTexts([self.texts[row] for row in rows], [self.labels[row] for row in rows])


@dataclass(frozen=True)
class RatedPairs:
    """Pairs of texts with a rating each (0 or 1 for "same or not")."""

    left: list[str]
    right: list[str]
    ratings: list[float]

    def first(self, limit: int | None) -> "RatedPairs":
        """Return at most the first ``limit`` pairs."""
        return RatedPairs(self.left[:limit], self.right[:limit], self.ratings[:limit])


def read_labelled(path: Path) -> LabelledTexts:
    """Return the texts and labels of a .jsonl file of ``{"text": ..., "label": ...}``, in its order."""
    rows = read_json_lines(path)
    return LabelledTexts([row.text("text") for row in rows], [row.label("label") for row in rows])


def read_scored_pairs(path: Path) -> RatedPairs:
    """Return the pairs of a file of graded similarity: score, sentence, sentence; tabs between, no header."""
    rows = read_tab_lines(path, ("score", "sentence1", "sentence2"))
    ratings = [row.number("score") for row in rows]
    return RatedPairs([row.text("sentence1") for row in rows], [row.text("sentence2") for row in rows], ratings)


def read_labelled_pairs(path: Path) -> RatedPairs:
    """Return the pairs of a .jsonl file of ``{"text1": ..., "text2": ..., "label": 1 for the same or 0}``."""
    rows = read_json_lines(path)
    ratings = [row.number("label") for row in rows]
    for row, rating in zip(rows, ratings, strict=True):
        if rating not in (0.0, 1.0):
            raise DataError(f"{row.where}: 'label' is {rating:g}, and must be 0 or 1")
    return RatedPairs([row.text("text1") for row in rows], [row.text("text2") for row in rows], ratings)


def labelled_splits(folder: Path) -> dict[str, Path]:
    """Return the files of ``train``, ``validation`` (``valid``, ``validation`` or ``dev``) and ``test`` in a folder."""
    named = {split: [f"{name}{ending}" for name in names for ending in ENDINGS] for split, names in _SPLITS.items()}
    return first_there(folder, named)


def first_there(folder: Path, named: Mapping[str, Iterable[str]]) -> dict[str, Path]:
    """Return for each key the first of its files that is in a folder; keys without one are left out."""
    paths = {key: [folder / name for name in names if (folder / name).is_file()] for key, names in named.items()}
    return {key: there[0] for key, there in paths.items() if there}


def named_files(folder: Path, endings: tuple[str, ...] = ENDINGS) -> dict[str, Path]:
    """Return a folder's files with such an ending by their names without it, sorted; none without the folder.

    Of two files of one name the ending that is listed first counts.
    """
    by_name: dict[str, Path] = {}
    for ending in endings:
        for path in folder.glob(f"*{ending}"):
            by_name.setdefault(path.name.removesuffix(ending), path)
    return dict(sorted(by_name.items()))


def single_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return the files of ``named_files``, each by itself."""
    return {name: (path,) for name, path in named_files(folder).items()}


def split_files(
    folder: Path, endings: tuple[str, ...] = (".json",), splits: tuple[str, ...] = ("test", "valid")
) -> dict[str, tuple[Path, ...]]:
    """Return by name the files ``NAME.test.json``, followed by ``NAME.valid.json`` where there is one."""
    files = named_files(folder, endings)
    names = sorted(name.removesuffix(f".{splits[0]}") for name in files if name.endswith(f".{splits[0]}"))
    return {name: tuple(files[f"{name}.{split}"] for split in splits if f"{name}.{split}" in files) for name in names}


def check_labels(train: LabelledTexts, test: LabelledTexts, *, train_path: Path, test_path: Path) -> None:
    """Check that a classifier can learn the test set's classes from training data."""
    if unseen := sorted(set(test.labels) - set(train.labels)):
        more = f" and {len(unseen) - _MOST_NAMED} more" if len(unseen) > _MOST_NAMED else ""
        named = f"label {', '.join(map(repr, unseen[:_MOST_NAMED]))}{more}"
        raise DataError(f"{train_path}: no example of {named}, which {test_path} asks for")
    if len(set(train.labels)) < 2:
        raise DataError(f"{train_path}: every example has the label {train.labels[0]!r}; two classes are needed")


def corpora_in(folder: Path) -> dict[str, dict[str, Path]]:
    """Return by name the files of every corpus ``NAME.test.*`` and ``NAME.valid.*`` in a folder, by split."""
    corpora: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*")):
        match = _CORPUS_NAME.fullmatch(path.name)
        if match is not None:
            corpora.setdefault(match["name"], {})["test" if match["split"] == "test" else "validation"] = path
    return corpora


def test_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return by name the files of every corpus that has a test file: that, then the validation file if there is one."""
    return {
        name: tuple(files[split] for split in ("test", "validation") if split in files)
        for name, files in corpora_in(folder).items()
        if "test" in files
    }


def corpus_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return the files of every corpus as ``test_files`` does; one with a validation file only is ``NAME.valid``."""
    others = {
        f"{name}.valid": (files["validation"],) for name, files in corpora_in(folder).items() if "test" not in files
    }
    return dict(sorted((test_files(folder) | others).items()))


def style_of(path: Path) -> str:
    """Return the style of ``gerund.data.corpus.clean_text`` that a corpus needs.

    >>> [style_of(Path(name)) for name in ("books.test.jsonl.xz", "facebook.test.jsonl", "enwiki.test.txt")]
    ['gutenberg', 'none', 'wikipedia']
    """
    return next((style for part, style in _STYLES.items() if re.search(part, path.name.lower())), "none")


def read_texts(path: Path, clean: str = AUTO) -> Iterator[str]:
    """Yield the cleaned texts of a corpus that are not empty; see ``read_titled``."""
    for document in read_titled(path, clean):
        yield document.text


def read_titled(path: Path, clean: str = AUTO) -> Iterator[Document]:
    """Yield the documents whose cleaned text is not empty, with their titles.

    ``clean`` is a style of ``gerund.data.corpus.clean_text``, or ``auto`` for ``style_of(path)``.
    """
    style = style_of(path) if clean == AUTO else clean
    for document in read_documents([path]):
        text = clean_text(document.text, style)
        if text.strip():
            yield Document(text, document.title.strip())


@dataclass(frozen=True)
class Choice:
    """A beginning (one text, or the sentences of a story) and continuations, of which number ``gold`` is right."""

    sentences: tuple[str, ...]
    candidates: tuple[str, ...]
    gold: int

    @property
    def prefix(self) -> str:
        """The beginning as one text."""
        return " ".join(self.sentences)

    @property
    def story(self) -> tuple[str, ...]:
        """The sentences, followed by the right ending."""
        return (*self.sentences, self.candidates[self.gold])


def story_files(folder: Path) -> dict[str, tuple[Path, ...]]:
    """Return the files of ``single_files`` that have stories."""
    return {name: paths for name, paths in single_files(folder).items() if has_stories(paths[0])}


def has_stories(path: Path) -> bool:
    """Whether the first row of a file has ``sentences``; a file that cannot be read is reported when it is scored."""
    try:
        [first] = read_json_lines(path, limit=1)
    except DataError:
        return False
    return "sentences" in first.values


def read_choices(path: Path) -> list[Choice]:
    """Return the rows of a file in one of the two layouts of published sets.

    ::

        {"prefix": ..., "suffixes": [...], "gold": 0}                   HellaSwag
        {"sentences": [...], "endings": [...], "gold": 0}               Story Cloze
    """
    return [_choice(row) for row in read_json_lines(path)]


def _choice(row: Row) -> Choice:
    if "sentences" in row.values:
        sentences, candidates = _texts(row, "sentences"), _texts(row, "endings")
    else:
        sentences, candidates = (row.text("prefix"),), _texts(row, "suffixes")
    gold = row.number("gold")
    if gold != int(gold) or not 0 <= gold < len(candidates):
        raise DataError(f"{row.where}: 'gold' is {gold:g}, and there are {len(candidates)} candidates, counted from 0")
    if len(candidates) < 2:
        raise DataError(f"{row.where}: a single candidate leaves nothing to choose")
    return Choice(sentences, candidates, int(gold))


def _texts(row: Row, name: str) -> tuple[str, ...]:
    values = row.values.get(name)
    if not isinstance(values, list) or not values:
        raise DataError(f"{row.where}: {name!r} is not a list of texts")
    texts = tuple(checked_text(value, row.where, name) for value in values)
    if not all(text.strip() for text in texts):
        raise DataError(f"{row.where}: {name!r} contains an empty text")
    return texts


_LISTED = 10
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Collection:
    """Documents, the queries that are scored, and what is relevant."""

    titles: Mapping[str, str]  # by document id; empty where there is none
    bodies: Mapping[str, str]  # by document id
    queries: Mapping[str, str]  # texts by query id: those with judgements, in the order of the file
    judgements: Mapping[str, Mapping[str, int]]  # grades by query and document id; relevant from 1 on
    unjudged: int = 0  # how many queries have no judgements and are left out

    @property
    def documents(self) -> dict[str, str]:
        """Texts by document id, title and body together as MTEB gives them to encoders."""
        return {
            id_: f"{title} {self.bodies[id_]}".strip() if title else self.bodies[id_].strip()
            for id_, title in self.titles.items()
        }

    @property
    def hopeless(self) -> int:
        """How many queries have judgements and not one relevant document."""
        return sum(all(grade < 1 for grade in grades.values()) for grades in self.judgements.values())

    @cached_property
    def itself(self) -> frozenset[str]:
        """The queries that are documents as well, as in ArguAna: same id, same text, and not judged relevant.

        The id alone says nothing: many collections number queries and documents independently.
        """
        return frozenset(
            query
            for query, text in self.queries.items()
            if query in self.bodies
            and text.split() in (body := self.bodies[query].split(), self.titles[query].split() + body)
            and self.judgements.get(query, {}).get(query, 0) < 1
        )

    def first(self, limit: int | None) -> "Collection":
        """Return the collection with at most the first ``limit`` queries, and all documents."""
        kept = list(self.queries)[:limit]
        return replace(
            self,
            queries={query: self.queries[query] for query in kept},
            judgements={query: self.judgements[query] for query in kept},
        )


def collection_files(folder: Path) -> dict[str, Path]:
    """Return the files of a collection that are there.

    Keys are ``corpus``, ``queries``, ``test``, ``validation``, ``test candidates`` and ``validation candidates``;
    the first two may be compressed.
    """
    places = {
        "corpus": [f"corpus{ending}" for ending in ENDINGS],
        "queries": [f"queries{ending}" for ending in ENDINGS],
        "test": ["qrels/test.tsv"],
        "validation": ["qrels/dev.tsv"],
        "test candidates": ["candidates/test.tsv"],
        "validation candidates": ["candidates/dev.tsv"],
    }
    return first_there(folder, places)


def read_collection(files: Mapping[str, Path], split: str = "test") -> Collection:
    """Return a collection with the queries that have judgements in a split."""
    corpus = _by_id(files["corpus"])
    queries = {id_: row.text("text") for id_, row in _by_id(files["queries"]).items()}
    if split not in files:
        raise DataError(f"{files['queries'].parent}: there is no qrels/dev.tsv, so nothing to validate on")
    judgements = _judgements(files[split])
    _check_known(files[split], "query", judgements, queries)
    _check_known(files[split], "document", (id_ for grades in judgements.values() for id_ in grades), corpus)
    return Collection(
        titles={id_: row.text("title") if row.values.get("title") else "" for id_, row in corpus.items()},
        bodies={id_: row.text("text") for id_, row in corpus.items()},
        queries={id_: text for id_, text in queries.items() if id_ in judgements},
        judgements=judgements,
        unjudged=len(queries.keys() - judgements.keys()),
    )


def read_candidates(path: Path, collection: Collection) -> dict[str, list[str]]:
    """Return the documents to be re-ranked by query; a query of the collection that has none gets an empty list."""
    candidates: dict[str, dict[str, None]] = {query: {} for query in collection.queries}
    for row, query, document in _pairs(path, ("query-id", "corpus-id")):
        # Queries that are not scored may have candidates all the same.
        _put(candidates.setdefault(query, {}), document, None, row)
    _check_known(path, "document", (id_ for documents in candidates.values() for id_ in documents), collection.titles)
    return {query: list(candidates[query]) for query in collection.queries}


def _by_id(path: Path) -> dict[str, Row]:
    by_id: dict[str, Row] = {}
    for row in read_json_lines(path):
        id_ = row.label("_id")
        if id_ in by_id:
            raise DataError(f"{row.where}: _id {id_!r} is there twice")
        by_id[id_] = row
    return by_id


def _judgements(path: Path) -> dict[str, dict[str, int]]:
    grades: dict[str, dict[str, int]] = {}
    for row, query, document in _pairs(path, ("query-id", "corpus-id", "score")):
        grade = row.number("score")
        if grade != int(grade):
            raise DataError(f"{row.where}: 'score' is {grade:g}, and must be a whole number")
        _put(grades.setdefault(query, {}), document, int(grade), row)
    return grades


def _pairs(path: Path, names: tuple[str, ...]) -> Iterable[tuple[Row, str, str]]:
    # The header is read as a row: a file without one would lose its first pair unnoticed.
    header, *rows = read_tab_lines(path, names)
    if tuple(header.values.values()) != names:
        raise DataError(f"{header.where}: expected the header {', '.join(names)}, separated by tabs")
    if not rows:
        raise DataError(f"{path}: there is nothing after the header")
    return ((row, row.label("query-id"), row.label("corpus-id")) for row in rows)


def _put(values: dict[str, _Value], document: str, value: _Value, row: Row) -> None:
    if document in values:
        raise DataError(f"{row.where}: the pair of query and document {document!r} is there twice")
    values[document] = value


def _check_known(path: Path, what: str, ids: Iterable[str], known: Mapping[str, object]) -> None:
    unknown = list(dict.fromkeys(id_ for id_ in ids if id_ not in known))
    if unknown:
        more = f" and {len(unknown) - _LISTED} more" if len(unknown) > _LISTED else ""
        raise DataError(f"{path}: no such {what}: {', '.join(unknown[:_LISTED])}{more}")
