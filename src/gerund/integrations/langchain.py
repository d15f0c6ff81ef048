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

import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from gerund.checks import one_of
from gerund.errors import MissingDependencyError
from gerund.inference.generate.config import ToolPrompt
from gerund.integrations.shared import (
    chat_model_of,
    facts,
    index_of,
    model_of,
    most_relevant,
    request,
    stop_strings,
    token_ids,
    tool_options,
    vectors,
)
from gerund.settings.ranking import RerankKeywords
from gerund.types import Generation as Written

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.language_models import BaseChatModel, BaseLLM
    from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, convert_to_openai_messages
    from langchain_core.messages.ai import UsageMetadata
    from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
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
    from langchain_core.utils.function_calling import convert_to_json_schema, convert_to_openai_tool
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
    """Precedes queries; None for the encoder's own."""
    document_prompt: str | None = None
    """Precedes documents; None for the encoder's own."""

    _load = field_validator("lm", mode="before")(model_of)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of documents; zeros for an empty one."""
        return vectors(self.lm, texts, "document", self.document_prompt)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query."""
        [vector] = vectors(self.lm, [text], "query", self.query_prompt)
        return vector


class _Generating(BaseModel):
    """Settings and streams of both kinds of language models."""

    lm: Any = Field(default=None, exclude=True, repr=False, validate_default=True)
    """A model in memory, or what ``gerund.load`` takes; None for the bundled one."""
    max_tokens: int = 256
    """Maximum number of new tokens."""
    temperature: float = 0.0
    """0 takes the most likely token each time; 1 samples from the model's distribution."""
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    """Strings that end the text."""

    @property
    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _Generating.model_fields if name != "lm"}

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"model_name": self.lm.name, **self._settings}

    def _run(self, method: Callable[..., Any], prompt: Any, stop: list[str] | None, given: dict[str, Any]) -> Any:
        """Call a method of the model with the settings of this object and of the call."""
        settings = {**given, "stop": stop_strings(self.stop, stop) or None}
        length, sampling, options = request(self._settings, settings)
        return method(self._prompt(prompt), length, sampling, **options)

    def _stream(
        self, prompt: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[Any]:
        stream = self._run(self.lm.stream, prompt, stop, kwargs)
        for piece in stream:
            chunk = self._chunk(piece)
            if run_manager is not None:
                run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        for chunk in self._last(stream.result):
            yield chunk

    async def _astream(
        self, prompt: Any, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[Any]:
        stream = self._run(self.lm.astream, prompt, stop, kwargs)
        async for piece in stream:
            chunk = self._chunk(piece)
            if run_manager is not None:
                await run_manager.on_llm_new_token(piece, chunk=chunk)
            yield chunk
        for chunk in self._last(stream.result):
            yield chunk

    def _prompt(self, prompt: Any) -> Any:
        return prompt

    def _chunk(self, piece: str) -> Any:
        return GenerationChunk(text=piece)

    def _last(self, result: Written) -> list[Any]:
        """Return the chunks after the last piece of a stream."""
        del result
        return []

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> Any:
        """Return the model's name and settings for LangChain's traces."""
        known = super()._get_ls_params(stop=stop, **kwargs)  # type: ignore[misc]  # of LangChain's class, which is next
        settings = {"temperature": self.temperature, "max_tokens": self.max_tokens, "model": self.lm.name, **kwargs}
        values = {f"ls_{name}": settings[name] for name in ("temperature", "max_tokens")}
        return {**known, "ls_provider": "gerund", "ls_model_name": settings["model"], **values}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the ids of a text's tokens, by the model's own tokenizer."""
        return token_ids(self.lm, text)


class ChatGerund(_Generating, BaseChatModel):
    """A chat model: conversations in the form of the model's own chat template.

    ``invoke``, ``stream`` and their asynchronous forms take all settings of ``gerund.Sampling`` and ``generate`` as
    keywords, such as ``model.invoke(messages, n=2, temperature=1)`` or ``model.bind(choice=["yes", "no"])``. Tools are
    bound with ``bind_tools``; images are refused.

    Raises:
        ModelError: the model has no chat template.
    """

    model_config = ConfigDict(extra="forbid")

    streaming: bool = False
    """Stream in ``invoke`` too, so that callbacks get each piece."""
    tool_prompt: ToolPrompt | None = None
    """How tools are described to a model whose chat template knows none: ``generic`` or ``smollm2``."""

    _load = field_validator("lm", mode="before")(chat_model_of)

    @property
    def _llm_type(self) -> str:
        return "gerund-chat"

    def _generate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        del run_manager
        return self._result(self._run(self.lm.chat, messages, stop, kwargs))

    async def _agenerate(
        self, messages: list[BaseMessage], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> ChatResult:
        del run_manager
        return self._result(await self._run(self.lm.achat, messages, stop, kwargs))

    def bind_tools(
        self, tools: Sequence[Any], *, tool_choice: str | bool | dict[str, Any] | None = None, **kwargs: Any
    ) -> Runnable[Any, Any]:
        """Return a model that may call tools; its messages have ``tool_calls``.

        Args:
            tools: functions with type hints, LangChain's tools, pydantic classes, or dicts in OpenAI's form.
            tool_choice: ``auto``, ``none``, ``required`` (also ``any`` and True) or a tool's name. A required call
                matches its tool's schema, which needs llguidance.
            **kwargs: further settings of each call, such as ``parallel_tool_calls``.
        """
        chosen = "required" if tool_choice in ("any", True) else tool_choice or None
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], tool_choice=chosen, **kwargs)

    def _run(self, method: Callable[..., Any], prompt: Any, stop: list[str] | None, given: dict[str, Any]) -> Any:
        tools, rest = tool_options(given, self.tool_prompt)
        return super()._run(partial(method, **tools), prompt, stop, rest)

    def _prompt(self, prompt: Any) -> Any:
        return list(convert_to_openai_messages(list(prompt)))  # with images, which gerund rejects by name

    def _chunk(self, piece: str) -> Any:
        return ChatGenerationChunk(message=AIMessageChunk(content=piece))

    def _last(self, result: Written) -> list[Any]:
        metadata = {"response_metadata": facts(self.lm, result), "usage_metadata": _usage(result)}
        calls = [tool_call_chunk(name=call.name, args=call.arguments, id=call.id, index=place)
                 for place, call in enumerate(result.tool_calls)]  # fmt: skip
        message = AIMessageChunk(content="", chunk_position="last", tool_call_chunks=calls, **metadata)
        return [ChatGenerationChunk(message=message)]

    def with_structured_output(
        self, schema: Any, *, include_raw: bool = False, method: str = "json_schema", **kwargs: Any
    ) -> Runnable[Any, Any]:
        """Return a model whose answers follow a schema and are parsed.

        The schema is enforced during generation, which needs llguidance: ``pip install 'gerund[structured]'``.

        Args:
            schema: a pydantic class, for which its objects are returned, or a JSON schema or ``TypedDict``, for
                which dicts are returned.
            include_raw: return a dict of the message (``raw``), what was ``parsed``, and the ``parsing_error``.
            method: one of LangChain's; the schema is enforced in the same way for each.
            **kwargs: further settings of the generation. ``strict`` changes nothing: the schema is always enforced.

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
        # LangChain removes the second argument, and passes it to callbacks and traces.
        traced = {"kwargs": {"method": method}, "schema": schema}
        model = self.bind(schema=form, ls_structured_output_format=traced, **kwargs)
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(parsed=itemgetter("raw") | parser, parsing_error=lambda _: None)
        unparsed = RunnablePassthrough.assign(parsed=lambda _: None)
        return RunnableMap(raw=model) | parsed.with_fallbacks([unparsed], exception_key="parsing_error")

    def _result(self, completions: Sequence[Written]) -> ChatResult:
        generations = []
        for completion in completions:
            metadata = facts(self.lm, completion)
            calls: dict[str, list[Any]] = {"tool_calls": [], "invalid_tool_calls": []}
            for call in completion.tool_calls:
                if call.is_valid:
                    calls["tool_calls"].append(tool_call(name=call.name, args=json.loads(call.arguments), id=call.id))
                else:
                    why = "the arguments are not a JSON object"
                    calls["invalid_tool_calls"].append(
                        invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=why)
                    )
            message = AIMessage(
                content=completion.text, response_metadata=metadata, usage_metadata=_usage(completion), **calls
            )
            info = {"finish_reason": metadata["finish_reason"]}
            generations.append(ChatGeneration(message=message, generation_info=info))
        return ChatResult(generations=generations)


class GerundLLM(_Generating, BaseLLM):
    """A completion model: it continues a text as ``generate`` does, several texts in one batch."""

    model_config = ConfigDict(extra="forbid")

    _load = field_validator("lm", mode="before")(model_of)

    @property
    def _llm_type(self) -> str:
        return "gerund"

    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        del run_manager
        return self._result(self._run(self.lm.generate, prompts, stop, kwargs), len(prompts))

    async def _agenerate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        del run_manager
        return self._result(await self._run(self.lm.agenerate, prompts, stop, kwargs), len(prompts))

    def _result(self, completions: Sequence[Written], prompts: int) -> LLMResult:
        each = len(completions) // prompts if prompts else 1
        listed = [Generation(text=item.text, generation_info=facts(self.lm, item)) for item in completions]
        grouped = [listed[start : start + each] for start in range(0, len(listed), each)]
        names = ("input_tokens", "output_tokens", "total_tokens")
        usage = {name: sum(_usage(item)[name] for item in completions) for name in names}
        return LLMResult(generations=grouped, llm_output={"model_name": self.lm.name, "token_usage": usage})


class GerundRetriever(BaseRetriever):
    """Finds chunks in an index of your documents; see ``gerund.open_index``.

    >>> import gerund
    >>> index = gerund.open_index(None, gerund.load())
    >>> _ = index.add_documents([gerund.Document("rail", "Trains need rails.")])
    >>> [document] = GerundRetriever(index=index, k=1).invoke("trains")
    >>> document.page_content, document.metadata["source"]
    ('Trains need rails.', 'rail')
    """

    model_config = ConfigDict(extra="forbid")

    index: Any = Field(exclude=True)
    """An index, or its location."""
    k: int = 4
    """Maximum number of chunks."""
    mode: str = "hybrid"
    filter: str | None = None
    weight: float | None = None
    expand: int = 0
    rerank: int = 0
    rerank_by: str | None = None
    rerank_weight: float | None = None
    rerank_deadline: float | None = None
    """As in ``Index.search``, like those above it; each may also be given to ``invoke``."""

    @field_validator("index", mode="before")
    @classmethod
    def _open(cls, given: Any) -> Any:
        return index_of(given)

    def _get_relevant_documents(self, query: str, *, run_manager: Any = None, **kwargs: Any) -> list[Document]:
        del run_manager
        names = ("k", "mode", "filter", "weight", "expand", *RerankKeywords.__annotations__)
        settings = {name: getattr(self, name) for name in names}
        documents = []
        for hit in self.index.search(query, **{**settings, **kwargs}):
            metadata = hit.to_dict()
            text = metadata.pop("text")
            documents.append(Document(page_content=text, metadata=metadata, id=f"{hit.source}:{hit.start}-{hit.end}"))
        return documents


class GerundReranker(BaseDocumentCompressor):
    """Keeps the documents that are most relevant to a query, best first; each gets a ``relevance_score``.

    Scores in the documents' metadata (``score``), such as those of ``GerundRetriever``, count too; see ``lm.rerank``.
    """

    model_config = ConfigDict(extra="forbid")

    lm: Any = Field(default=None, exclude=True, validate_default=True)
    """A model in memory, or what ``gerund.load`` takes; None for the bundled one."""
    top_n: int | None = 3
    """Number of documents to keep; None for all that have a text."""
    by: str | None = None
    """How relevance is measured: ``lift``, ``vectors`` and others; see ``lm.rerank``."""
    weight: float | None = None
    """What the measure counts beside the documents' scores, from 0 to 1."""
    deadline: float | None = None
    """Seconds per query after which no further document is read."""

    _load = field_validator("lm", mode="before")(model_of)

    def compress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Callbacks | None = None
    ) -> Sequence[Document]:
        """Return the most relevant documents, best first; the passed documents are not changed."""
        del callbacks
        texts = [document.page_content for document in documents]
        scores = [document.metadata.get("score") for document in documents]
        stage = {"weight": self.weight, "deadline": self.deadline}
        ranking = most_relevant(self.lm, query, texts, self.top_n, self.by, scores, **stage)  # type: ignore[arg-type]
        return [
            documents[place].model_copy(update={"metadata": {**documents[place].metadata, "relevance_score": score}})
            for place, score in ranking
        ]


def _usage(written: Written) -> UsageMetadata:
    usage = written.usage
    return UsageMetadata(
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        total_tokens=usage.total_tokens,
        input_token_details={"cache_read": usage.cached_tokens},
    )
