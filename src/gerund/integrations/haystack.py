"""gerund inside Haystack: embedders, a chat generator, a ranker and a retriever, in this process.

>>> import gerund
>>> from gerund.integrations.haystack import GerundTextEmbedder
>>> lm = gerund.load()
>>> len(GerundTextEmbedder(lm).run("a cat")["embedding"]) == lm.dimensions
True

A pipeline that is stored names its models, and loads them by these names again: ``Pipeline.load(file,
allowed_modules=["gerund.integrations.haystack"])``. Components that name one model in the same way share it in memory.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from inspect import isawaitable
from pathlib import Path
from threading import Lock
from typing import Any, Self
from weakref import WeakValueDictionary

from gerund.errors import ConfigError, MissingDependencyError
from gerund.inference.generate.prompts import require_chat_template
from gerund.integrations.shared import (
    Model,
    Request,
    facts,
    index_of,
    model_of,
    most_relevant,
    request,
    usage_of,
    vectors,
)
from gerund.language_model import LanguageModel
from gerund.retrieval.index import Index
from gerund.settings.model_spec import ModelSpec
from gerund.settings.ranking import RelevanceMeasure
from gerund.types import Generation

try:
    from haystack import Document, component, default_from_dict, default_to_dict
    from haystack.dataclasses import ChatMessage, ComponentInfo, StreamingChunk, select_streaming_callback
    from haystack.utils import deserialize_callable, serialize_callable
except ImportError as error:
    raise MissingDependencyError("this needs haystack-ai: pip install 'gerund[haystack]'") from error

_loaded: "WeakValueDictionary[str, LanguageModel]" = WeakValueDictionary()
_loading = Lock()


class _WithModel:
    """A component with a model, which is loaded on first use and stored by its spec."""

    model: Model
    _lm: LanguageModel | None = None
    _stored: tuple[str, ...] = ()
    """Names of the other settings that are stored."""

    @property
    def lm(self) -> LanguageModel:
        """The model in memory."""
        if self._lm is None:
            if isinstance(self.model, str | Path | ModelSpec | None):
                key = ModelSpec.of(self.model).model_dump_json()
                with _loading:
                    self._lm = _loaded.get(key) or model_of(self.model)
                    _loaded[key] = self._lm
            else:
                self._lm = model_of(self.model)
        return self._lm

    def warm_up(self) -> None:
        """Load the model."""
        _ = self.lm

    def to_dict(self) -> dict[str, Any]:
        """Return the component as Haystack stores it."""
        model: Any = self.model
        if isinstance(model, Path):
            model = str(model)
        elif not isinstance(model, str | None):
            spec = model if isinstance(model, ModelSpec) else model.spec
            model = json.loads(spec.model_dump_json())
        return dict(default_to_dict(self, model=model, **{name: getattr(self, name) for name in self._stored}))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the component that ``to_dict`` described."""
        given = data.get("init_parameters", {})
        if isinstance(given.get("model"), dict):
            given = {**given, "model": ModelSpec.model_validate(given["model"])}
        component_: Self = default_from_dict(cls, {**data, "init_parameters": given})
        return component_


@component
class GerundTextEmbedder(_WithModel):
    """Embeds a text, such as a query."""

    _stored = ("prompt",)

    def __init__(self, model: Model = None, *, prompt: str | None = None) -> None:
        """Embed by a model's encoder.

        Args:
            model: a model in memory, or what ``gerund.load`` takes; None for the bundled one.
            prompt: put before the text; None for the encoder's own prompt for queries.
        """
        self.model, self.prompt = model, prompt

    @component.output_types(embedding=list[float], meta=dict[str, Any])
    def run(self, text: str) -> dict[str, Any]:
        """Return the ``embedding`` of a text, and ``meta`` with the model's name."""
        if not isinstance(text, str):
            raise ConfigError("GerundTextEmbedder embeds one text; documents are for GerundDocumentEmbedder")
        [vector] = vectors(self.lm, [text], "query", self.prompt)
        return {"embedding": vector, "meta": {"model": self.lm.name}}


@component
class GerundDocumentEmbedder(_WithModel):
    """Embeds documents."""

    _stored = ("prompt", "meta_fields_to_embed")

    def __init__(
        self, model: Model = None, *, prompt: str | None = None, meta_fields_to_embed: Sequence[str] = ()
    ) -> None:
        """Embed by a model's encoder.

        Args:
            model: a model in memory, or what ``gerund.load`` takes; None for the bundled one.
            prompt: put before each text; None for the encoder's own prompt for documents.
            meta_fields_to_embed: fields of ``meta`` that are read before a document's text, a line each.
        """
        self.model, self.prompt, self.meta_fields_to_embed = model, prompt, list(meta_fields_to_embed)

    @component.output_types(documents=list[Document], meta=dict[str, Any])
    def run(self, documents: list[Document]) -> dict[str, Any]:
        """Return the ``documents``, each with its embedding, and ``meta`` with the model's name."""
        if not isinstance(documents, list) or not all(isinstance(item, Document) for item in documents):
            raise ConfigError("GerundDocumentEmbedder embeds a list of documents; a text is for GerundTextEmbedder")
        embeddings = vectors(self.lm, [self._text(item) for item in documents], "document", self.prompt)
        embedded = [replace(item, embedding=vector) for item, vector in zip(documents, embeddings, strict=True)]
        return {"documents": embedded, "meta": {"model": self.lm.name}}

    def _text(self, document: Document) -> str:
        values = [document.meta.get(name) for name in self.meta_fields_to_embed]
        return "\n".join([*(str(value) for value in values if value is not None), document.content or ""])


@component
class GerundChatGenerator(_WithModel):
    """Generates the next message of a conversation, in the form of the model's own chat template."""

    _stored = ("generation_kwargs",)

    def __init__(
        self,
        model: Model = None,
        *,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: Callable[[StreamingChunk], Any] | None = None,
    ) -> None:
        """Generate with a model that was trained to chat.

        Args:
            model: a model in memory, or what ``gerund.load`` takes.
            generation_kwargs: ``max_new_tokens``, and the settings of ``gerund.Sampling`` and ``generate``.
            streaming_callback: called with each piece of the text.

        Raises:
            ModelError: the model in memory has no chat template.
            ConfigError: there is no such setting.
        """
        self.model, self.generation_kwargs, self.streaming_callback = model, generation_kwargs or {}, streaming_callback
        request(self.generation_kwargs)
        if isinstance(model, LanguageModel):
            self.warm_up()

    def warm_up(self) -> None:
        """Load the model.

        Raises:
            ModelError: it has no chat template.
        """
        require_chat_template(self.lm.tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """Return the component as Haystack stores it."""
        stored = _WithModel.to_dict(self)  # not super(): @component makes a new class of this one
        callback = None if self.streaming_callback is None else serialize_callable(self.streaming_callback)
        stored["init_parameters"]["streaming_callback"] = callback
        return stored

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Return the component that ``to_dict`` described."""
        given = dict(data.get("init_parameters", {}))
        if given.get("streaming_callback"):
            given["streaming_callback"] = deserialize_callable(given["streaming_callback"])
        component_: Self = _WithModel.from_dict.__func__(cls, {**data, "init_parameters": given})  # type: ignore[attr-defined]
        return component_

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: Callable[[StreamingChunk], Any] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        tools: Any = None,
    ) -> dict[str, Any]:
        """Return the ``replies``, one unless ``n`` asks for more.

        Raises:
            ModelError: the model has no chat template.
            ConfigError: tools are given, or there is no such setting.
        """
        conversation, (length, sampling, options) = self._request(messages, generation_kwargs, tools)
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=False)
        if callback is None:
            return self._replies(self.lm.chat(conversation, length, sampling, **options))
        about = ComponentInfo.from_component(self)
        stream = self.lm.stream(conversation, length, sampling, **options)
        for number, piece in enumerate(stream):
            callback(self._chunk(piece, about, start=number == 0))
        assert stream.result is not None
        callback(self._chunk("", about, finish_reason=stream.result.finish_reason))
        return self._replies([stream.result])

    @component.output_types(replies=list[ChatMessage])
    async def run_async(
        self,
        messages: list[ChatMessage] | str,
        streaming_callback: Callable[[StreamingChunk], Any] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        *,
        tools: Any = None,
    ) -> dict[str, Any]:
        """Return the ``replies`` as ``run`` does, without blocking the event loop."""
        conversation, (length, sampling, options) = self._request(messages, generation_kwargs, tools)
        callback = select_streaming_callback(self.streaming_callback, streaming_callback, requires_async=True)
        if callback is None:
            return self._replies(await self.lm.achat(conversation, length, sampling, **options))

        async def call(chunk: StreamingChunk) -> None:
            # Like Haystack's own generators, this accepts a callback that is not async.
            result = callback(chunk)
            if isawaitable(result):
                await result

        about, number = ComponentInfo.from_component(self), 0
        stream = self.lm.astream(conversation, length, sampling, **options)
        async for piece in stream:
            await call(self._chunk(piece, about, start=number == 0))
            number += 1
        assert stream.result is not None
        await call(self._chunk("", about, finish_reason=stream.result.finish_reason))
        return self._replies([stream.result])

    def _request(
        self, messages: list[ChatMessage] | str, given: dict[str, Any] | None, tools: Any
    ) -> tuple[list[dict[str, Any]], Request]:
        if tools:
            raise ConfigError("gerund's chat takes no tools; leave tools out")
        self.warm_up()
        listed = [ChatMessage.from_user(messages)] if isinstance(messages, str) else messages
        conversation = [item.to_openai_dict_format(require_tool_call_ids=False) for item in listed]
        return conversation, request(self.generation_kwargs, given or {})

    def _chunk(self, piece: str, about: ComponentInfo, **more: Any) -> StreamingChunk:
        return StreamingChunk(content=piece, meta={"model": self.lm.name}, component_info=about, index=0, **more)

    def _replies(self, completions: Sequence[Generation]) -> dict[str, Any]:
        replies = []
        for number, completion in enumerate(completions):
            metadata = facts(self.lm, completion)
            meta = {"model": metadata.pop("model_name"), "index": number, "usage": usage_of(completion), **metadata}
            replies.append(ChatMessage.from_assistant(completion.text, meta=meta))
        return {"replies": replies}


@component
class GerundRanker(_WithModel):
    """Keeps the documents that are most relevant to a query, best first, with their scores.

    Scores that the documents have, such as those of a retriever, count too; see ``lm.rerank``.
    """

    _stored = ("top_k", "by", "weight", "deadline")

    def __init__(
        self,
        model: Model = None,
        *,
        top_k: int | None = 10,
        by: RelevanceMeasure | None = None,
        weight: float | None = None,
        deadline: float | None = None,
    ) -> None:
        """Rank by a model.

        Args:
            model: a model in memory, or what ``gerund.load`` takes; None for the bundled one.
            top_k: number of documents to keep; None for all that have a text.
            by: how relevance is measured: ``lift``, ``vectors`` and others; see ``lm.rerank``.
            weight: what the measure counts beside the documents' scores, from 0 to 1.
            deadline: seconds per query after which no further document is read.
        """
        self.model, self.top_k, self.by, self.weight, self.deadline = model, top_k, by, weight, deadline

    @component.output_types(documents=list[Document])
    def run(self, query: str, documents: list[Document], top_k: int | None = None) -> dict[str, Any]:
        """Return the most relevant ``documents``, best first."""
        texts = [document.content for document in documents]
        most, scores = top_k if top_k is not None else self.top_k, [document.score for document in documents]
        stage = {"weight": self.weight, "deadline": self.deadline}
        ranking = most_relevant(self.lm, query, texts, most, self.by, scores, **stage)
        return {"documents": [replace(documents[place], score=score) for place, score in ranking]}


@component
class GerundRetriever:
    """Finds chunks in an index of your documents; see ``gerund.open_index``.

    >>> import gerund
    >>> index = gerund.open_index(None, gerund.load())
    >>> _ = index.add_documents([gerund.Document("rail", "Trains need rails.")])
    >>> [document] = GerundRetriever(index, top_k=1).run("trains")["documents"]
    >>> document.content, document.meta["source"]
    ('Trains need rails.', 'rail')
    """

    def __init__(self, index: Index | str | Path, *, top_k: int = 10, search: dict[str, Any] | None = None) -> None:
        """Search an index.

        Args:
            index: an index, or its location; only a location can be stored with a pipeline.
            top_k: maximum number of chunks.
            search: further arguments of ``Index.search``, such as ``mode`` or ``filter``.
        """
        self.top_k, self.search = top_k, search or {}
        self._given, self._index = index, index if isinstance(index, Index) else None

    def warm_up(self) -> None:
        """Open the index."""
        self._index = self._index or index_of(self._given)

    def to_dict(self) -> dict[str, Any]:
        """Return the component as Haystack stores it."""
        if isinstance(self._given, Index):
            raise ConfigError("a pipeline is stored with the place of its index; give GerundRetriever the place")
        return dict(default_to_dict(self, index=str(self._given), top_k=self.top_k, search=self.search))

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None, search: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the ``documents`` that match a query best."""
        self.warm_up()
        assert self._index is not None
        settings = {"k": self.top_k if top_k is None else top_k, **self.search, **(search or {})}
        documents = []
        for hit in self._index.search(query, **settings):
            meta = hit.to_dict()
            text, score, place = meta.pop("text"), meta.pop("score"), f"{hit.source}:{hit.start}-{hit.end}"
            documents.append(Document(id=place, content=text, score=score, meta=meta))
        return {"documents": documents}
