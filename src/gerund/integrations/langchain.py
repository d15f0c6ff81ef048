"""gerund inside LangChain: embeddings, a chat and a completion model, a retriever and a compressor, in this process.

All of them may share one model in memory.

>>> import gerund
>>> from gerund.integrations.langchain import GerundEmbeddings, GerundLLM
>>> lm = gerund.load()
>>> len(GerundEmbeddings(lm=lm).embed_query("a cat")) == lm.dimensions
True
>>> GerundLLM(lm=lm, max_tokens=5).invoke("The old man") == lm.generate("The old man", 5)[0].text
True
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from operator import itemgetter
from typing import Any

from gerund.checks import one_of
from gerund.errors import MissingDependencyError
from gerund.integrations.shared import (
    Request,
    chat_model_of,
    facts,
    index_of,
    model_of,
    most_relevant,
    request,
    stop_strings,
    token_ids,
    vectors,
)
from gerund.types import Generation as Written

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.language_models import BaseChatModel, BaseLLM
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
    from langchain_core.outputs import (
        ChatGeneration,
        ChatGenerationChunk,
        ChatResult,
        Generation,
        GenerationChunk,
        LLMResult,
    )
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
    from langchain_core.utils.function_calling import convert_to_json_schema
    from langchain_core.utils.pydantic import is_basemodel_subclass
except ImportError as error:
    raise MissingDependencyError("this needs langchain-core: pip install 'gerund[langchain]'") from error

from pydantic import BaseModel, ConfigDict, Field, field_validator

_METHODS = ["json_schema", "function_calling", "json_mode"]


class GerundEmbeddings(BaseModel, Embeddings):
    """Embeddings by the model's encoder: queries and documents each with the encoder's own prompt for them."""

    model_config = ConfigDict(extra="forbid")

    lm: Any = Field(default=None, exclude=True, validate_default=True)
    """A model in memory, or what ``gerund.load`` takes; None for the bundled one."""
    query_prompt: str | None = None
    """Put before queries; None for the encoder's own."""
    document_prompt: str | None = None
    """Put before documents; None for the encoder's own."""

    _load = field_validator("lm", mode="before")(model_of)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of documents; zeros for an empty one."""
        return vectors(self.lm, texts, "document", self.document_prompt)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        [vector] = vectors(self.lm, [text], "query", self.query_prompt)
        return vector


class _Writing(BaseModel):
    """What both kinds of language models can be told."""

    lm: Any = Field(default=None, exclude=True, repr=False, validate_default=True)
    """A model in memory, or what ``gerund.load`` takes; None for the bundled one."""
    max_tokens: int = 256
    """How much to write at most."""
    temperature: float = 0.0
    """0 takes the most probable token each time; 1 samples from the model as it is."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    """Strings before which the text ends."""

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _Writing.model_fields if name != "lm"}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.lm.name, **self._settings}

    def _request(self, stop: list[str] | None, given: dict[str, Any]) -> Request:
        return request(self._settings, {**given, "stop": stop_strings(self.stop, stop) or None})

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        """Name what LangChain's traces call a model and its settings."""
        known = super()._get_ls_params(stop=stop, **kwargs)  # type: ignore[misc]  # of LangChain's class, which is next
        asked = {"temperature": self.temperature, "max_tokens": self.max_tokens, "model": self.lm.name, **kwargs}
        own = {f"ls_{name}": asked[name] for name in ("temperature", "max_tokens")}
        return {**known, "ls_provider": "gerund", "ls_model_name": asked["model"], **own}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text's tokens, by the model's own tokenizer."""
        return token_ids(self.lm, text)


class ChatGerund(_Writing, BaseChatModel):
    """A chat model: conversations in the form of the model's own chat template.

    ``invoke``, ``stream`` and their asynchronous forms take all settings of ``gerund.Sampling`` and ``generate`` as
    keywords, such as ``model.invoke(messages, n=2, temperature=1)`` or ``model.bind(choice=["yes", "no"])``. Tools and
    images are refused.

    Raises:
        ModelError: the model has no chat template.
    """

    model_config = ConfigDict(extra="forbid")

    streaming: bool = False
    """Write by the stream in ``invoke`` too, so that callbacks get each piece."""

    _load = field_validator("lm", mode="before")(chat_model_of)

    @property
    def _llm_type(self) -> str:
        return "gerund-chat"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        del run_manager
        length, sampling, options = self._request(stop, kwargs)
        return self._result(self.lm.chat(_conversation(messages), length, sampling, **options))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> ChatResult:
        del run_manager
        length, sampling, options = self._request(stop, kwargs)
        return self._result(await self.lm.achat(_conversation(messages), length, sampling, **options))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        length, sampling, options = self._request(stop, kwargs)
        stream = self.lm.stream(_conversation(messages), length, sampling, **options)
        for piece in stream:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager is not None:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield self._last(stream.result)

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        length, sampling, options = self._request(stop, kwargs)
        stream = self.lm.astream(_conversation(messages), length, sampling, **options)
        async for piece in stream:
            chunk = ChatGenerationChunk(message=AIMessageChunk(content=piece))
            if run_manager is not None:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        yield self._last(stream.result)

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, method: str = "json_schema", **kwargs: Any
    ) -> Runnable[Any, Any]:
        """Return a model whose answers have the form of a schema, and are parsed.

        The form is enforced while the model writes, which needs llguidance: ``pip install 'gerund[structured]'``.

        Args:
            schema: a class of pydantic, of which objects are returned, or a JSON schema or a ``TypedDict``, for which
                dicts are.
            include_raw: return a dict of the message (``raw``), what was ``parsed``, and the ``parsing_error``.
            method: one of LangChain's; the form is enforced in the same way for each.
            **kwargs: further settings of the generation. ``strict`` changes nothing: the form is always enforced.

        Raises:
            ConfigError: there is no such method.
        """
        one_of("method", method, _METHODS)
        kwargs.pop("strict", None)
        parser: Any = JsonOutputParser()
        if is_basemodel_subclass(schema):
            parser = PydanticOutputParser(pydantic_object=schema)
        is_plain = isinstance(schema, dict) and not {"title", "name"} & schema.keys()
        form = schema if is_plain else convert_to_json_schema(schema)
        # LangChain takes the second out again, for callbacks and traces.
        told = {"kwargs": {"method": method}, "schema": schema}
        model = self.bind(schema=form, ls_structured_output_format=told, **kwargs)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")

    def _result(self, written: Sequence[Written]) -> ChatResult:
        found = []
        for one in written:
            about = facts(self.lm, one)
            message = AIMessage(content=one.text, response_metadata=about, usage_metadata=_usage(one))
            found.append(ChatGeneration(message=message, generation_info={"finish_reason": about["finish_reason"]}))
        return ChatResult(generations=found)

    def _last(self, written: Written | None) -> ChatGenerationChunk:
        """Return the chunk behind the last piece of a stream: why it ended, and what it took."""
        assert written is not None
        about = {"response_metadata": facts(self.lm, written), "usage_metadata": _usage(written)}
        return ChatGenerationChunk(message=AIMessageChunk(content="", chunk_position="last", **about))


class GerundLLM(_Writing, BaseLLM):
    """A completion model: it continues a text as ``generate`` does, several texts in one batch."""

    model_config = ConfigDict(extra="forbid")

    _load = field_validator("lm", mode="before")(model_of)

    @property
    def _llm_type(self) -> str:
        return "gerund"

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        del run_manager
        length, sampling, options = self._request(stop, kwargs)
        return self._result(self.lm.generate(prompts, length, sampling, **options), len(prompts))

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: Any = None,
        **kwargs: Any,
    ) -> LLMResult:
        del run_manager
        length, sampling, options = self._request(stop, kwargs)
        return self._result(await self.lm.agenerate(prompts, length, sampling, **options), len(prompts))

    def _stream(
        self, prompt: str, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        length, sampling, options = self._request(stop, kwargs)
        for piece in self.lm.stream(prompt, length, sampling, **options):
            chunk = GenerationChunk(text=piece)
            if run_manager is not None:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk

    async def _astream(
        self, prompt: str, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[GenerationChunk]:
        length, sampling, options = self._request(stop, kwargs)
        async for piece in self.lm.astream(prompt, length, sampling, **options):
            chunk = GenerationChunk(text=piece)
            if run_manager is not None:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk

    def _result(self, written: Sequence[Written], prompts: int) -> LLMResult:
        own = [Generation(text=one.text, generation_info=facts(self.lm, one)) for one in written]
        each = len(own) // prompts if prompts else 1
        usage = {
            name: sum(_usage(one)[name] for one in written)
            for name in ("input_tokens", "output_tokens", "total_tokens")
        }
        grouped = [own[start : start + each] for start in range(0, len(own), each)]
        return LLMResult(generations=grouped, llm_output={"model_name": self.lm.name, "token_usage": usage})


class GerundRetriever(BaseRetriever):
    """Finds chunks in an index of one's own documents; see ``gerund.open_index``.

    >>> import gerund
    >>> index = gerund.open_index(None, gerund.load())
    >>> _ = index.add_documents([gerund.Document("rail", "Trains need rails.")])
    >>> [document] = GerundRetriever(index=index, k=1).invoke("trains")
    >>> document.page_content, document.metadata["source"]
    ('Trains need rails.', 'rail')
    """

    model_config = ConfigDict(extra="forbid")

    index: Any = Field(exclude=True)
    """An index, or where one lies."""
    k: int = 4
    """How many chunks at most."""
    mode: str = "hybrid"
    filter: str | None = None
    weight: float | None = None
    expand: int = 0
    rerank: int = 0
    """As in ``Index.search``, like those above it; each may also be given to ``invoke``."""

    @field_validator("index", mode="before")
    @classmethod
    def _open(cls, given: Any) -> Any:
        return index_of(given)

    def _get_relevant_documents(self, query: str, *, run_manager: Any = None, **kwargs: Any) -> list[Document]:
        del run_manager
        asked = {name: getattr(self, name) for name in ("k", "mode", "filter", "weight", "expand", "rerank")}
        found = []
        for hit in self.index.search(query, **{**asked, **kwargs}):
            about = hit.to_dict()
            text = about.pop("text")
            found.append(Document(page_content=text, metadata=about, id=f"{hit.source}:{hit.start}-{hit.end}"))
        return found


class GerundReranker(BaseDocumentCompressor):
    """Keeps the documents that are most relevant to a query, best first; each gets a ``relevance_score``."""

    model_config = ConfigDict(extra="forbid")

    lm: Any = Field(default=None, exclude=True, validate_default=True)
    """A model in memory, or what ``gerund.load`` takes; None for the bundled one."""
    top_n: int | None = 3
    """How many documents are kept; None for all that have a text."""
    by: str | None = None
    """How relevance is measured: ``vectors``, ``model`` or ``likelihood``; see ``lm.rerank``."""

    _load = field_validator("lm", mode="before")(model_of)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return the most relevant documents, best first; the given ones are left as they are."""
        del callbacks
        texts = [one.page_content for one in documents]
        places = most_relevant(self.lm, query, texts, self.top_n, self.by)  # type: ignore[arg-type]
        return [
            documents[place].model_copy(update={"metadata": {**documents[place].metadata, "relevance_score": score}})
            for place, score in places
        ]


def _conversation(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages as gerund takes them, which refuses tools and images by name."""
    return list(convert_to_openai_messages(list(messages)))


def _usage(written: Written) -> UsageMetadata:
    usage = written.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens, output_tokens=usage.completion_tokens, total_tokens=usage.total_tokens
    )
