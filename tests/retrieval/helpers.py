"""Chunks, vectors and cuts without a model: quick, and the same in every process.

Processes that only index import this module, so nothing here imports torch before it is needed.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from gerund.retrieval.documents import Chunk, Chunking, Document
from gerund.retrieval.indexing import IndexSummary, Writer
from gerund.retrieval.lance_store import LanceStore
from gerund.retrieval.store import IndexMetadata, Match, VectorStore

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel
    from gerund.retrieval.index import Index

NOTES = {
    "bread": "Bread is made of flour, water and salt. Yeast makes the dough rise.",
    "rail": "The first public railway to use steam locomotives was opened in 1825. It ran to Darlington.",
    "birds": "Swallows build their nests of mud under the roofs of barns.",
    "sea": "The old man looked at the sea. The waves were high.",
}

DIMENSIONS = 8
ABOUT = IndexMetadata("0123456789abcdef", "a model", DIMENSIONS, "causal, mean", Chunking())


def write_notes(folder: Path) -> Path:
    """Write the notes into a new folder, a file each."""
    folder.mkdir()
    for name, text in NOTES.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def notes_index(lm: "LanguageModel", tokens: int = 128) -> "Index":
    """Return an index in memory of the notes."""
    from gerund.retrieval.index import open_index

    index = open_index(None, lm, chunking=Chunking(tokens=tokens))
    index.add_documents([Document(name, text, f"About {name}") for name, text in NOTES.items()])
    return index


def vector_of(text: str) -> np.ndarray:
    """Return a vector of length 1 that depends on the text alone."""
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    vector = np.random.default_rng(seed).normal(size=DIMENSIONS).astype(np.float32)
    return vector / np.linalg.norm(vector)


def chunk(source: str, text: str, number: int = 0, **changes: str) -> Chunk:
    """Return a chunk of a document."""
    about = {"title": "", "heading": "", "file": f"{source}.txt", "digest": f"hash of {text}", **changes}
    return Chunk(source, 100 * number, 100 * number + len(text), text, number, 7, **about)


def stored(store: VectorStore, chunks: Sequence[Chunk]) -> None:
    """Put chunks into a store."""
    store.replace(list(dict.fromkeys(one.source for one in chunks)), chunks, vectors([one.text for one in chunks]))


def vectors(texts: Sequence[str]) -> np.ndarray:
    """Return vectors that depend on the texts alone."""
    return np.stack([vector_of(text) for text in texts])


def sources(found: Sequence[Match]) -> list[str]:
    """Return the names of the documents that were found."""
    return [one.source for one, _ in found]


def embed(documents: Sequence[Sequence[Chunk]]) -> np.ndarray:
    """Embed by hashing."""
    return np.stack([vector_of(one.text) for own in documents for one in own])


def cut_lines(document: Document) -> list[Chunk]:
    """Let every line be a chunk."""
    chunks, place = [], 0
    for line in document.text.splitlines(keepends=True):
        if line.strip():
            start, end = place, place + len(line.rstrip("\n"))
            chunks.append(
                Chunk(
                    source=document.source, start=start, end=end, text=document.text[start:end], number=len(chunks),
                    tokens=len(line.split()), title=document.title, heading="", file=document.file,
                    digest=document.digest,
                )
            )  # fmt: skip
        place += len(line)
    return chunks


def index_files(place: Path, paths: Sequence[Path], **settings: bool) -> IndexSummary:
    """Bring an index up to date as ``Index.add`` does, with the embedding and the cut of this module."""
    store = LanceStore(place)
    store.create(ABOUT)
    writer = Writer(store, cut_lines, embed, place.resolve().parent)
    writer.add_files(paths, **settings)
    return writer.tidied()
