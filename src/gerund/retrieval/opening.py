"""``gerund.open_index``: from a place to an ``Index`` of what lies there.

Knows: which store a place means, what files are named relative to. Does not know: what is done with an index.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from gerund.checks import place
from gerund.errors import ConfigError, DataError
from gerund.retrieval.documents import Chunking
from gerund.retrieval.index import Index
from gerund.retrieval.lance_store import LanceStore, is_remote
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.store import VectorStore
from gerund.settings.model_spec import ModelSpec

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel


def open_index(
    where: "str | Path | VectorStore | None" = None,
    lm: "LanguageModel | ModelSpec | str | Path | None" = None,
    *,
    chunking: Chunking | None = None,
) -> "Index":
    """Open an index of documents; where there is none yet, the first ``add`` makes it.

    Args:
        where: a folder; the path of an object store, such as ``s3://bucket/my.index``; a store; or None for an index in
            memory.
        lm: the model, in memory or as ``gerund.load`` takes it; None loads the one that the index was made with when it
            is needed, for a new index the bundled one.
        chunking: how documents are cut and embedded; None leaves it as the index has it, and takes the defaults for a
            new one.

    Raises:
        FingerprintError: the index was made with another encoder.
        ConfigError: it was cut in another way, or ``where`` is no path.
        DataError: there is something else.
        MissingDependencyError: LanceDB is not installed.

    >>> index = gerund.open_index(None, gerund.load())
    >>> texts = {"bread": "Bread is made of flour.", "rail": "Trains need rails."}
    >>> _ = index.add_documents([gerund.Document(name, text) for name, text in texts.items()])
    >>> [hit] = index.search("flour for bread", k=1)
    >>> hit.source, hit.text
    ('bread', 'Bread is made of flour.')
    """
    if chunking is not None and not isinstance(chunking, Chunking):
        raise ConfigError(f"chunking is a Chunking, such as Chunking(tokens=128), not {chunking!r}")
    if not (where is None or isinstance(where, str | Path) or callable(getattr(where, "vectors", None))):
        raise ConfigError(f"the index is a folder, a store or None, not {where!r}")
    root = None
    if where is None:
        root = Path.cwd()
    elif isinstance(where, str | Path) and not is_remote(str(where)):
        root = place("the index", where).resolve().parent
    store = where if where is not None and not isinstance(where, str | Path) else store_at(where)
    return Index(store, lm, chunking=chunking, root=root)


def demand_index(where: str, *, opened: bool = True) -> None:
    """Refuse a place where there is no index.

    Args:
        where: a folder, or the path of an object store.
        opened: whether the index is opened too, for which LanceDB is imported; without, its folder is looked at.

    Raises:
        DataError: there is none, with the command that makes one.
    """
    if not is_remote(where) and not Path(where).exists():
        raise DataError(f"{where}: no such index; gerund index PATHS -o {where} makes one")
    store = LanceStore(where)
    if not store.is_there or (opened and store.about() is None):
        raise DataError(f"{where}: there is no index in it; gerund index PATHS -o {where} makes one")


def store_at(where: str | Path | None) -> VectorStore:
    """Return the store at a place: a folder, the path of an object store, or None for one in memory.

    Raises:
        ConfigError: it is no path.
        DataError: there is something else.
    """
    if where is None:
        return MemoryStore()
    return LanceStore(where if is_remote(str(where)) else place("the index", where))
