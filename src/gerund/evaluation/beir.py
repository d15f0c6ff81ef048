"""Read collections of documents, queries and relevance judgements in the layout of BEIR (Thakur et al., 2021).

::

    corpus.jsonl            {"_id": ..., "title": ..., "text": ...}      title is optional
    queries.jsonl           {"_id": ..., "text": ...}
    qrels/test.tsv          query-id <tab> corpus-id <tab> score, with a header; dev.tsv for validation
    candidates/test.tsv     query-id <tab> corpus-id, with a header: documents to be re-ranked (optional)
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from gerund.errors import DataError
from gerund.evaluation.data_files import ENDINGS, Row, read_json_lines, read_tab_lines

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
    files = {}
    for key, names in places.items():
        path = next((folder / name for name in names if (folder / name).is_file()), None)
        if path is not None:
            files[key] = path
    return files


def collections_in(folder: Path) -> dict[str, dict[str, Path]]:
    """Return the files of every collection in a folder by its name, sorted; those without a test set are none."""
    collections = {path.name: collection_files(path) for path in sorted(folder.glob("*")) if path.is_dir()}
    return {name: files for name, files in collections.items() if {"corpus", "queries", "test"} <= files.keys()}


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
