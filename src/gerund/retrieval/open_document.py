"""``gerund.open_document``: ask questions about a single document, which the model reads once.

Its keys and values are cached in memory, and on disk where a cache is given, so that the next question starts
immediately. The result is that of reading everything again, up to rounding.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from gerund.checks import place
from gerund.data.files import shown_path
from gerund.errors import ConfigError, DataError, TextError
from gerund.jobs.disk_cache import MOST_BYTES, DiskCache, user_cache
from gerund.retrieval.document_reader import ReadLimits, read_file
from gerund.retrieval.documents import Chunking, Document
from gerund.retrieval.index import Index
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.question_answering import EXTRACTIVE, GENERATE, PendingAnswer, Question, QuestionAnswering
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
    """Open a document to ask questions about it.

    Args:
        path: a file of text, Markdown, HTML, PDF and so on, as ``Index.add`` reads it.
        lm: the model, in memory or as ``gerund.load`` takes it; None for the bundled model.
        cache: stores the document's keys and values for other processes: a folder, or
            ``gerund.jobs.disk_cache.DiskCache`` with its own limit. It contains the text of the document too. None
            caches in memory only.
        limits: time and memory for reading the document; None for the default limits.
        language: the document's language, as in ``Chunking``, for answers that quote a sentence.

    Raises:
        DataError: the file does not exist, cannot be read, or is a table of many documents.
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
    document = Document(shown_path(path), parsed.text, parsed.title, parsed.sections)
    # Only now: it takes seconds, and a missing file should raise immediately.
    from gerund.entry import load

    model = load(lm) if lm is None or isinstance(lm, ModelSpec | str | Path) else lm
    kept = cache if cache is None or isinstance(cache, DiskCache) else DiskCache(cache)
    return OpenDocument(document, model, kept, chunking)


def demand_file(path: str | Path) -> Path:
    """Return the path of a file, which must exist."""
    file = place("the document", path)
    if not file.is_file():
        raise DataError(f"{file}: {'a folder, not a document' if file.is_dir() else 'no such file'}")
    return file


def usual_cache(folder: Path | None = None, most_bytes: int = MOST_BYTES) -> DiskCache:
    """Return the cache that the command line uses; ``folder`` None is in the user's caches."""
    return DiskCache(user_cache(CACHE_NAME) if folder is None else folder, most_bytes)


class OpenDocument(QuestionAnswering):
    """A document to ask questions about; see ``open_document``."""

    def __init__(
        self, document: Document, lm: "LanguageModel", cache: DiskCache | None = None, chunking: Chunking | None = None
    ) -> None:
        self.document, self._lm, self._chunking = document, lm, chunking or Chunking()
        self._cache = cache
        self._sessions: dict[str, Session | None] = {}

    @property
    def lm(self) -> "LanguageModel":
        """The model."""
        return self._lm

    @property
    def chunking(self) -> Chunking:
        """How the document is split for extractive answers, and its language."""
        return self._chunking

    def prepare(self, question: Question) -> Answer | PendingAnswer:
        """Return the answer to a checked question, or what a model generates it from."""
        if question.method_for(self.lm) != GENERATE:
            return self._index.prepare(question)
        if question.filter is not None or question.weight is not None or question.second.rerank:
            raise ConfigError("a single document is read completely, without a search; remove filter, weight, rerank")
        if question.approximate_cache is not None:
            raise ConfigError("`approximate_cache` is for an index; the cache of a single document is exact")
        if question.context is not None:
            raise ConfigError("a single document is read completely; context chooses what is read of an index")
        from gerund.retrieval.answer_generation import AnswerPrompt, session_for

        prompter, document = self._prompter.adding(question.instructions), self.document
        questions = [*(turn["content"] for turn in question.history[::2]), question.question]
        answers = [turn["content"] for turn in question.history[1::2]]
        limit, room = prompter.room(question.max_new_tokens)
        while True:
            prompt = prompter.of_document(questions, answers, document.title, document.text)
            if (ids := prompter.ids_that_fit(prompt, room)) is not None:
                break
            if not answers:
                raise TextError(
                    f"{document.source} does not fit: the model's context has {limit} tokens, of which some are kept "
                    f"for question and answer; make an index of it with gerund index"
                )
            questions, answers = questions[1:], answers[1:]  # without the oldest turn
        source = Source(1, document.source, 0, len(document.text), document.text, document.title)
        answer_tokens = question.max_new_tokens if limit is None or room is None else limit - room
        answer_prompt = AnswerPrompt(ids, [source], answer_tokens, prompter.stop)
        return PendingAnswer(
            question,
            self.lm,
            answer_prompt,
            session_for(ids, self._session_of(question.instructions)),
            cites=False,
            language=self.chunking.language,
            quote=(lambda: self._quoted(question)) if question.fallback else None,
        )

    def _quoted(self, question: Question) -> Answer:
        """Return the best sentence of the document; for this its sentences are embedded."""
        quoted = self._index.prepare(replace(question, method=EXTRACTIVE))
        assert isinstance(quoted, Answer)
        return quoted

    @cached_property
    def _index(self) -> Index:
        index = Index(MemoryStore(), self.lm, chunking=self._chunking)
        index.add_documents([self.document])
        return index

    @cached_property
    def _prompter(self) -> "Prompter":
        from gerund.retrieval.answer_generation import Prompter

        return Prompter(self.lm.model, self.lm.tokenizer)

    def _session_of(self, instructions: str) -> "Session | None":
        """Return the session that has read the document after these instructions; the last one stays in memory."""
        known = self._sessions
        if instructions not in known:
            known = self._sessions = {instructions: self._new_session(instructions)}
        return known[instructions]

    def _new_session(self, instructions: str) -> "Session | None":
        """Return a session from the cache, or a new one; None where the model cannot extend one."""
        from gerund.inference.generate.session import Session, cache_key
        from gerund.retrieval.answer_generation import DUMMIES, cached, common_start, prefilled, save_cached

        title, text, prompter = self.document.title, self.document.text, self._prompter.adding(instructions)
        prompts = [prompter.of_document([dummy], [], title, text) for dummy in DUMMIES]
        ids = common_start(*map(prompter.prompt_ids, prompts))
        if self._cache is None:
            return prefilled(self.lm, ids)
        key = cache_key(self.lm, ids)
        session = cached(self._cache, key, ids, lambda folder: Session.load(folder, self.lm))
        if session is None:
            session = prefilled(self.lm, ids)
            if session is not None:
                save_cached(self._cache, key, session, Session.save_into, self.document.source)
        return session
