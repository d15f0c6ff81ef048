"""Chunks and queries in LanceDB's terms: Arrow tables, how words are found in a language, queries of full text.

Knows: Arrow, LanceDB's names. Does not know: where tables lie.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.quantization import quantize, width_of
from gerund.retrieval.documents import BINARY, Chunk
from gerund.retrieval.store import Words

if TYPE_CHECKING:
    import pyarrow as pa

FIELDS = ("source", "start", "stop", "text", "number", "tokens", "title", "heading", "file", "digest")
"""The columns of a chunk, in the order of its attributes."""

# LanceDB's names of the languages that it knows stems and stop words of.
_LANGUAGES = {
    "ar": "Arabic", "da": "Danish", "nl": "Dutch", "en": "English", "fi": "Finnish", "fr": "French", "de": "German",
    "el": "Greek", "hu": "Hungarian", "it": "Italian", "no": "Norwegian", "pt": "Portuguese", "ro": "Romanian",
    "ru": "Russian", "es": "Spanish", "sv": "Swedish", "ta": "Tamil", "tr": "Turkish",
}  # fmt: skip
_WITHOUT_SPACES = ("zh", "ja", "ko", "th", "km", "lo", "my")


def analysis(language: str) -> dict[str, Any]:
    """Return how words are found in a language: its stems and stop words where they are known."""
    if language in _LANGUAGES:
        return {"language": _LANGUAGES[language]}
    return {"base_tokenizer": "icu" if language in _WITHOUT_SPACES else "simple", "stem": False} | {
        "remove_stop_words": False
    }


def full_text(query: Words) -> Any:
    """Return a query of words as LanceDB takes it; None for one without a word.

    Not as a text, in which some characters would have a meaning.
    """
    from lancedb.query import BooleanQuery, MatchQuery, Occur, PhraseQuery

    has_words = any(letter.isalnum() for letter in query.text)
    phrases = [PhraseQuery(one, "words") for one in query.phrases if any(letter.isalnum() for letter in one)]
    if not phrases:
        return MatchQuery(query.text, "words") if has_words else None
    must = [(Occur.MUST, one) for one in phrases]
    return BooleanQuery([*must, (Occur.SHOULD, MatchQuery(query.text, "words"))] if has_words else must)


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
    named |= {"tokens": number, "title": text, "heading": text, "file": text, "digest": text, "words": text}
    return pa.schema([*named.items(), ("vector", vector_type(dimensions, precision))])


def text_rows(columns: Mapping[str, Sequence[str]]) -> "pa.Table":
    """Return a table of texts."""
    import pyarrow as pa

    return pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})


def arrow_rows(chunks: Sequence[Chunk], vectors_ND: np.ndarray, precision: str) -> "pa.Table":
    """Return chunks with their vectors, in the precision that the index has, as rows."""
    import pyarrow as pa

    schema = schema_of(vectors_ND.shape[1], precision)
    columns: dict[str, list[Any]] = {
        name: [getattr(one, "end" if name == "stop" else name) for one in chunks] for name in ("id", *FIELDS)
    }
    columns["words"] = [one.indexed_text for one in chunks]
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
