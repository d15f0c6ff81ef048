"""Another encoder, or another way to cut, for documents that are indexed already.

A second set of tables is filled beside the first, from the texts that are stored, and takes its place in one step.

Knows: what an index says about itself, the order of steps. Does not know: files, how anything is stored.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from gerund.errors import ConfigError, DataError
from gerund.language_model import LanguageModel
from gerund.models.sources import found_from_anywhere
from gerund.progress import progress
from gerund.retrieval.chunking import cut
from gerund.retrieval.documents import Chunk, Chunking, Document, rebuilt
from gerund.retrieval.embedding import Embedder
from gerund.retrieval.indexing import CHUNKS_AT_ONCE, DOCUMENTS_AT_ONCE, Cut, Embed
from gerund.retrieval.store import About, VectorStore


def migrate_index(
    store: VectorStore,
    lm: LanguageModel,
    chunking: Chunking | None = None,
    show_progress: bool | None = None,
    *,
    embed: Embed | None = None,
) -> int:
    """Embed every document of a store anew; see ``Index.migrate``. ``embed`` does it in the place of this process."""
    old = store.about()
    if old is None:
        raise DataError(f"{store.name}: there is no index yet, so nothing to migrate")
    about = about_of(lm, chunking or old.chunking)
    if about.key == old.key:
        with store.locked():
            store.drop_others()
        return 0
    embedder = Embedder(lm, about.chunking)

    def cut_anew(document: Document) -> list[Chunk]:
        return cut(document, lm.tokenizer, about.chunking)

    with store.locked():
        other = store.beside(about)
        count = refill(store, other, cut_anew, embed or embedder.chunks, show_progress)
        other.tidy()
        store.swap(other)
    return count


def about_of(lm: LanguageModel, chunking: Chunking) -> About:
    """Return what an index says about itself that is made with a model."""
    try:
        spec = found_from_anywhere(lm.spec).model_dump(exclude_none=True)
    except ConfigError:  # made in memory
        spec = None
    fingerprint, space = lm.fingerprint(), lm.space
    own = "" if space == fingerprint else space
    return About(fingerprint, lm.name, lm.dimensions, describe_encoder(lm), chunking, spec, own)


def difference(about: About, lm: LanguageModel) -> str:
    """Return what a model is that did not make an index: the settings that differ, or else another model's name."""
    own, before = dict(about_of(lm, about.chunking).spec or {}), dict(about.spec or {})
    names = [name for name in sorted({*own, *before}) if own.get(name) != before.get(name)]
    if not own or not names or "model" in names:
        return f", not with {lm.name} ({describe_encoder(lm)}, {lm.fingerprint()})"
    said = [f"{name} {before.get(name, 'as usual')}, not {own.get(name, 'as usual')}" for name in names]
    return f": {'; '.join(said)}"


def describe_encoder(lm: LanguageModel) -> str:
    """Return an encoder's plan and pooling in a few words."""
    plan = lm.encoder.attention.with_defaults(lm.n_layers)
    numbers = "".join(f" {name}={value}" for name in ("k", "k0") if (value := getattr(plan, name)) is not None)
    return f"{plan.name}{numbers}, {lm.encoder.pooling}"


def refill(old: VectorStore, new: VectorStore, cut: Cut, embed: Embed, show_progress: bool | None = None) -> int:
    """Cut and embed every document of a store anew into another, from the texts that are stored.

    What an interrupted migration left in the other one is not embedded again.

    Args:
        old: the store that there is.
        new: what took shape beside it.
        cut: cuts a document.
        embed: embeds the chunks of documents.
        show_progress: None shows a bar on a terminal.

    Returns:
        How many documents were embedded.
    """
    documents, done = old.documents(), new.documents()
    left = [source for source, state in documents.items() if done.get(source) != state]
    with progress(len(documents), "embedding anew", show=show_progress) as advance:
        advance(len(documents) - len(left))
        for first in range(0, len(left), DOCUMENTS_AT_ONCE):
            sources = left[first : first + DOCUMENTS_AT_ONCE]
            by_source: dict[str, list[Chunk]] = {}
            for chunk in old.chunks_of(sources):
                by_source.setdefault(chunk.source, []).append(chunk)
            for batch in _batches(by_source, cut):
                # The hash is that of the document as it was read, by which the next run knows it.
                own = [[replace(one, digest=documents[one.source].digest) for one in chunks] for chunks in batch]
                new.replace([chunks[0].source for chunks in own], [one for chunks in own for one in chunks], embed(own))
            advance(len(sources))
    stale = [source for source in done if source not in documents]
    new.replace(stale, [], np.zeros((0, 0), dtype=np.float32))
    new.note_files({**dict.fromkeys(new.files().keys() - old.files().keys()), **old.files()})
    return len(left)


def _batches(by_source: dict[str, list[Chunk]], cut: Cut) -> Iterator[list[list[Chunk]]]:
    batch: list[list[Chunk]] = []
    for chunks in by_source.values():
        batch.append(cut(rebuilt(chunks)))
        if sum(map(len, batch)) >= CHUNKS_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch
