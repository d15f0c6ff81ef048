"""``gerund.open_document``: one document, read once and asked many times.

The model reads the whole document; what it computed is kept, in memory and where a cache is given on the disk too, so
that the next question starts at once. The result is that of reading everything anew, up to rounding.

Knows: files, sessions, where they are kept. Does not know: how anything is found.
"""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from gerund.checks import place
from gerund.errors import ConfigError, DataError, FingerprintError, GerundError, TextError
from gerund.jobs.disk_cache import MOST_BYTES, DiskCache, user_cache
from gerund.retrieval.document_reader import ReadLimits, read_file
from gerund.retrieval.documents import Chunking, Document
from gerund.retrieval.index import Index
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.question_answering import GENERATE, Asked, Asking, Written, method_of
from gerund.settings.model_spec import ModelSpec
from gerund.types import Answer, Source

if TYPE_CHECKING:
    from gerund.inference.generate.session import Session
    from gerund.language_model import LanguageModel
    from gerund.retrieval.answer_generation import Prompter

CACHE_NAME = "sessions"


def open_document(
    path: str | Path,
    lm: "LanguageModel | ModelSpec | str | Path | None" = None,
    *,
    cache: str | Path | DiskCache | None = None,
    limits: ReadLimits | None = None,
    language: str = "en",
) -> "OpenDocument":
    """Open one document to be asked.

    Args:
        path: a file of text, Markdown, HTML, PDF and so on, as ``Index.add`` reads it.
        lm: the model, in memory or as ``gerund.load`` takes it; None for the bundled one.
        cache: where what was read is kept for other processes: a folder, or ``gerund.jobs.disk_cache.DiskCache`` with a
            limit of its own. It holds the text of the document too. None keeps it in memory alone.
        limits: what reading the document may take; None for the usual limits.
        language: what the document is written in, as in ``Chunking``, where the answer is a sentence of it.

    Raises:
        DataError: the file is not there, cannot be read, or is a table of many documents.
        ConfigError: ``language`` is not a language code.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "rail.txt")
    ...     _ = path.write_text("The railway opened in 1825. It was the first.")
    ...     document = gerund.open_document(path)
    >>> document.ask("When was the railway opened?").text
    'The railway opened in 1825.'
    """
    chunking = Chunking(language=language)
    file = demand_file(path)
    parts = list(read_file(file, limits=limits))
    if len(parts) > 1 or parts[0].key:
        raise DataError(f"{file} holds {len(parts)} documents, a row each; make an index of it: gerund index {file}")
    [parsed] = parts
    document = Document(str(path), parsed.text, parsed.title, parsed.sections)
    # Only now: it takes seconds, and a file that is not there is told at once.
    from gerund.entry import load

    model = load(lm) if lm is None or isinstance(lm, ModelSpec | str | Path) else lm
    kept = cache if cache is None or isinstance(cache, DiskCache) else DiskCache(cache)
    return OpenDocument(document, model, kept, chunking)


def demand_file(path: str | Path) -> Path:
    """Return the file of a document.

    Raises:
        DataError: there is none.
        ConfigError: it is no path.
    """
    file = place("the document", path)
    if not file.is_file():
        raise DataError(f"{file}: {'a folder, and one document is wanted' if file.is_dir() else 'no such file'}")
    return file


def usual_cache(folder: Path | None = None, most_bytes: int = MOST_BYTES) -> DiskCache:
    """Return the cache that the command line uses.

    Args:
        folder: where it lies; None for this user's caches.
        most_bytes: what it may hold.
    """
    return DiskCache(user_cache(CACHE_NAME) if folder is None else folder, most_bytes)


class OpenDocument(Asking):
    """One document that is asked; see ``open_document``.

    Attributes:
        document: the document.
    """

    def __init__(
        self,
        document: Document,
        lm: "LanguageModel",
        cache: DiskCache | None = None,
        chunking: Chunking | None = None,
    ) -> None:
        self.document, self._lm, self._chunking = document, lm, chunking or Chunking()
        self._cache = cache
        self._session: Session | None = None
        self._tried = False
        self._index: Index | None = None

    @property
    def lm(self) -> "LanguageModel":
        """The model."""
        return self._lm

    @property
    def chunking(self) -> Chunking:
        """How it is cut where a sentence of it is the answer, and what it is written in."""
        return self._chunking

    def _prepared(self, asked: Asked) -> Answer | Written:
        if method_of(asked, self.lm) != GENERATE:
            return self._own_index()._prepared(asked)
        if asked.filter is not None or asked.weight is not None or asked.rerank:
            raise ConfigError("the whole document is read, and nothing searched; leave filter, weight and rerank out")
        if asked.approximate_cache is not None:
            raise ConfigError("what is read of one document is kept as it is; approximate_cache is for an index")
        from gerund.retrieval.answer_generation import AnswerPrompt, Prompter

        prompter = Prompter(self.lm.model, self.lm.tokenizer)
        one = self.document
        questions = [*(turn["content"] for turn in asked.history[::2]), asked.question]
        answers = [turn["content"] for turn in asked.history[1::2]]
        limit, room = prompter.room(asked.max_new_tokens)
        while True:
            ids = prompter.fitting(prompter.of_document(questions, answers, one.title, one.text), room)
            if ids is not None:
                break
            if not answers:
                raise TextError(
                    f"{one.source} does not fit: the model's context has {limit} tokens, of which some are kept for "
                    f"question and answer; make an index of it with gerund index"
                )
            # Its beginning is the document; of the turns the oldest go.
            questions, answers = questions[1:], answers[1:]
        source = Source(1, one.source, 0, len(one.text), one.text, one.title)
        answer = asked.max_new_tokens if limit is None or room is None else limit - room
        answer_prompt = AnswerPrompt(ids, [source], answer, prompter.stop)
        known = self._read(prompter)
        fits = known is not None and ids[: len(known.token_ids)] == known.token_ids
        return Written(asked, self.lm, answer_prompt, known if fits else None, cites=False)

    def _own_index(self) -> Index:
        if self._index is None:
            self._index = Index(MemoryStore(), self.lm, chunking=self._chunking)
            self._index.add_documents([self.document])
        return self._index

    def _read(self, prompter: "Prompter") -> "Session | None":
        """Return the document as the model has read it: just now, or some time before."""
        from gerund.retrieval.answer_generation import DUMMIES, common_start, read_once

        if self._tried:
            return self._session
        one = self.document
        prompts = [prompter.prompt_ids(prompter.of_document([text], [], one.title, one.text)) for text in DUMMIES]
        ids = common_start(*prompts)
        self._session = self._kept(ids)
        if self._session is None:
            self._session = read_once(self.lm, ids)
            if self._session is not None:
                self._keep(self._session)
        self._tried = True
        return self._session

    def _key(self, ids: list[int]) -> str:
        from gerund.inference.generate.session import cache_key

        return cache_key(self.lm, ids)

    def _kept(self, ids: list[int]) -> "Session | None":
        """Return what the cache has; what is damaged is removed, and read anew."""
        from gerund.inference.generate.session import Session

        found = None if self._cache is None else self._cache.get(self._key(ids))
        if found is None or self._cache is None:
            return None
        try:
            session = Session.load(found, self.lm)
        except (DataError, FingerprintError):
            self._cache.drop(self._key(ids))
            return None
        return session if session.token_ids == ids else None

    def _keep(self, session: "Session") -> None:
        """Put what was read into the cache; where that fails a warning says so, and the answer comes all the same."""
        if self._cache is None:
            return
        try:
            if session.n_bytes <= self._cache.most_bytes:
                self._cache.put(self._key(session.token_ids), session.save_into)
        except GerundError as error:
            warnings.warn(f"what was read of {self.document.source} is not kept: {error}", stacklevel=2)
