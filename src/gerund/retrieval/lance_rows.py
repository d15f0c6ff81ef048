"""Chunks and queries in LanceDB's terms: Arrow tables, the index of words, queries of full text.

Knows: Arrow, LanceDB's names. Does not know: where tables lie.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.quantization import quantize, width_of
from gerund.retrieval.documents import BINARY, Chunk
from gerund.retrieval.store import Words
from gerund.text_analysis import Analyzer

if TYPE_CHECKING:
    import pyarrow as pa

FIELDS = ("source", "start", "stop", "text", "number", "tokens", "title", "heading", "file", "digest")
"""The columns of a chunk, in the order of its attributes."""

TERMS = "terms"
"""The column of a chunk's terms, one space between two. Where terms come to be others than they are, it is called
otherwise, so that the words of what is stored are analysed again."""

# The terms are what ``text_analysis`` makes of a text: LanceDB changes nothing about them.
_AS_THEY_ARE = {
    "base_tokenizer": "whitespace",
    "max_token_length": None,
    "lower_case": False,
    "stem": False,
    "remove_stop_words": False,
    "ascii_folding": False,
    "with_position": True,
}


def word_index() -> Any:
    """Return LanceDB's settings of the index of terms."""
    from lancedb.index import FTS

    return FTS(**_AS_THEY_ARE)


def terms_of(chunk: Chunk, analyzer: Analyzer) -> str:
    """Return the terms of a chunk, as the table has them."""
    return " ".join(analyzer.document(chunk.indexed_text))


def full_text(query: Words, analyzer: Analyzer) -> Any:
    """Return a query of words as LanceDB takes it; None for one without a word.

    Not as a text, in which some characters would have a meaning.
    """
    from lancedb.query import BooleanQuery, MatchQuery, Occur, PhraseQuery

    words = " ".join(analyzer.query(query.text))
    phrases = [PhraseQuery(terms, TERMS) for one in query.phrases if (terms := " ".join(analyzer.phrase(one)))]
    if not phrases:
        return MatchQuery(words, TERMS) if words else None
    must = [(Occur.MUST, one) for one in phrases]
    return BooleanQuery([*must, (Occur.SHOULD, MatchQuery(words, TERMS))] if words else must)


def vector_type(dimensions: int, precision: str) -> "pa.DataType":
    """Return the type of a vector's column: numbers, or bytes of eight bits each."""
    import pyarrow as pa

    if precision == BINARY:
        return pa.list_(pa.uint8(), width_of(dimensions, precision))
    return pa.list_(pa.float16() if precision == "float16" else pa.float32(), dimensions)


def precision_in(schema: "pa.Schema") -> str:
    """Return how a table's vectors are stored."""
    return {"uint8": BINARY, "halffloat": "float16"}.get(str(schema.field("vector").type.value_type), "float32")


def stored_in(rows: "pa.Table") -> np.ndarray:
    """Return the vectors of rows as they are stored: numbers ``(n, dimensions)``, or bits ``(n, bytes)``."""
    column = rows.column("vector").combine_chunks()
    found: np.ndarray = column.flatten().to_numpy(zero_copy_only=False).reshape(len(rows), column.type.list_size)
    return found


def schema_of(dimensions: int, precision: str) -> "pa.Schema":
    """Return the columns of a table of chunks."""
    import pyarrow as pa

    text, number = pa.string(), pa.int64()
    named = {"id": text, "source": text, "start": number, "stop": number, "text": text, "number": number}
    named |= {"tokens": number, "title": text, "heading": text, "file": text, "digest": text, TERMS: text}
    return pa.schema([*named.items(), ("vector", vector_type(dimensions, precision))])


def text_rows(columns: Mapping[str, Sequence[str]]) -> "pa.Table":
    """Return a table of texts."""
    import pyarrow as pa

    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def arrow_rows(chunks: Sequence[Chunk], vectors_ND: np.ndarray, precision: str, analyzer: Analyzer) -> "pa.Table":
    """Return chunks with their vectors, in the precision that the index has, as rows."""
    import pyarrow as pa

    schema = schema_of(vectors_ND.shape[1], precision)
    columns: dict[str, list[Any]] = {
        name: [getattr(one, "end" if name == "stop" else name) for one in chunks] for name in ("id", *FIELDS)
    }
    columns[TERMS] = [terms_of(one, analyzer) for one in chunks]
    kept = quantize(vectors_ND, "ubinary") if precision == BINARY else vectors_ND.astype(precision)
    flat = pa.array(np.ascontiguousarray(kept).ravel())
    arrays = [
        pa.FixedSizeListArray.from_arrays(flat, kept.shape[1]) if one.name == "vector"
        else pa.array(columns[one.name], one.type)
        for one in schema
    ]  # fmt: skip
    return pa.Table.from_arrays(arrays, schema=schema)


def chunks_in(rows: "pa.Table") -> list[Chunk]:
    """Return the chunks in rows."""
    return [Chunk(*values) for values in zip(*(rows.column(name).to_pylist() for name in FIELDS), strict=True)]
