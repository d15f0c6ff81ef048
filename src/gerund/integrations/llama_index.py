"""gerund inside LlamaIndex: embeddings, a language model, a retriever and a node post-processor, in this process.

All of them may share one model in memory.

>>> import gerund
>>> from gerund.integrations.llama_index import GerundEmbedding, GerundLLM
>>> lm = gerund.load()
>>> len(GerundEmbedding(lm=lm).get_query_embedding("a cat")) == lm.dimensions
True
>>> GerundLLM(lm=lm, max_tokens=5).complete("The old man").text == lm.generate("The old man", 5)[0].text
True
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gerund.errors import ConfigError, MissingDependencyError
from gerund.inference.generate.config import ToolPrompt
from gerund.inference.generate.prompts import has_tools_in_template
from gerund.inference.tokens import context_length
from gerund.integrations.shared import (
    Model,
    Request,
    facts,
    index_of,
    model_of,
    most_relevant,
    request,
    tool_options,
    usage_of,
    vectors,
)
from gerund.retrieval.index import Index
from gerund.types import Generation, ToolCall

try:
    from llama_index.core.base.llms.types import (
        ChatMessage,
        ChatResponse,
        CompletionResponse,
        LLMMetadata,
        MessageRole,
        TextBlock,
        ToolCallBlock,
    )
    from llama_index.core.bridge.pydantic import ConfigDict, Field
    from llama_index.core.embeddings import BaseEmbedding
    from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
    from llama_index.core.llms.function_calling import FunctionCallingLLM
    from llama_index.core.llms.llm import ToolSelection
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
except ImportError as error:
    raise MissingDependencyError("this needs llama-index-core: pip install 'gerund[llama-index]'") from error

_UNLIMITED = 1 << 20


class GerundEmbedding(BaseEmbedding):
    """Embeddings by the model's encoder: queries and texts each with the encoder's own prompt for them."""

    model_config = ConfigDict(extra="forbid")

    lm: Any = Field(exclude=True, description="A model in memory, or what gerund.load takes.")
    query_prompt: str | None = Field(default=None, description="Precedes queries; None for the encoder's own.")
    text_prompt: str | None = Field(default=None, description="Precedes texts; None for the encoder's own.")

    def __init__(self, lm: Model = None, **settings: Any) -> None:
        loaded = model_of(lm)
        super().__init__(lm=loaded, **{"model_name": loaded.name, **settings})

    @classmethod
    def class_name(cls) -> str:
        """Return this class's name in LlamaIndex."""
        return "GerundEmbedding"

    def _get_query_embedding(self, query: str) -> list[float]:
        [vector] = vectors(self.lm, [query], "query", self.query_prompt)
        return vector

    def _get_text_embedding(self, text: str) -> list[float]:
        [vector] = self._get_text_embeddings([text])
        return vector

    def _get_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return vectors(self.lm, texts, "document", self.text_prompt)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await asyncio.to_thread(self._get_query_embedding, query)

    async def _aget_text_embedding(self, text: str) -> list[float]:
        return await asyncio.to_thread(self._get_text_embedding, text)

    async def _aget_text_embeddings(self, texts: list[str]) -> list[list[float]]:
        return await asyncio.to_thread(self._get_text_embeddings, texts)


class GerundLLM(FunctionCallingLLM):
    """A language model: it continues a text, chats where it has a chat template, and calls tools where that knows them.

    ``complete``, ``chat`` and their other forms take all settings of ``gerund.Sampling`` and ``generate`` as keywords,
    ``chat`` those of tools too, such as ``tool_choice``. Agents of LlamaIndex pass their tools by ``chat_with_tools``.
    """

    model_config = ConfigDict(extra="forbid")

    lm: Any = Field(exclude=True, description="A model in memory, or what gerund.load takes.")
    max_tokens: int = Field(default=256, description="Maximum number of new tokens.")
    temperature: float = Field(default=0.0, description="0 takes the most likely token each time.")
    tool_prompt: ToolPrompt | None = Field(
        default=None, description="How tools are described to a model whose chat template knows none."
    )
    additional_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Further settings of gerund.Sampling and generate, such as top_p or stop."
    )

    def __init__(self, lm: Model = None, **settings: Any) -> None:
        super().__init__(lm=model_of(lm), **settings)
        self._request({})

    @classmethod
    def class_name(cls) -> str:
        """Return this class's name in LlamaIndex."""
        return "GerundLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """The context's size, and whether the model chats and calls tools."""
        tokenizer = self.lm.tokenizer
        chats = bool(tokenizer.chat_template)
        return LLMMetadata(
            # Not ``max_length``, which bounds what is encoded.
            context_window=context_length(self.lm.model.config, tokenizer) or _UNLIMITED,
            num_output=self.max_tokens,
            is_chat_model=chats,
            is_function_calling_model=chats and (self.tool_prompt is not None or has_tools_in_template(tokenizer)),
            model_name=self.lm.name,
        )

    def _request(self, given: dict[str, Any]) -> Request:
        settings = {"max_tokens": self.max_tokens, "temperature": self.temperature}
        generation = request(settings, self.additional_kwargs, given)
        if generation.options.get("n", 1) != 1:
            raise ConfigError(f"n={generation.options['n']}: LlamaIndex takes one text of a call; call it as often")
        return generation

    def _run(self, method: Callable[..., Any], prompt: Any, given: dict[str, Any]) -> Any:
        """Call a method of the model with the settings of this object and of the call."""
        length, sampling, options = self._request(given)
        return method(prompt, length, sampling, **options)

    def _chat(self, method: Callable[..., Any], messages: Sequence[ChatMessage], given: dict[str, Any]) -> Any:
        tools, rest = tool_options(given, self.tool_prompt)
        return self._run(partial(method, **tools), _conversation(messages), rest)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[Any],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of ``chat`` for LlamaIndex's tools."""
        del verbose
        new = ChatMessage(role=MessageRole.USER, content=user_msg) if isinstance(user_msg, str) else user_msg
        usual = {"tool_choice": "required"} if tool_required else {}
        return {
            "messages": [*(chat_history or []), *([] if new is None else [new])],
            "tools": [tool.metadata.to_openai_tool(skip_length_check=True) for tool in tools],
            "parallel_tool_calls": allow_parallel_tool_calls,
            **usual,
            **kwargs,
        }

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls of an answer; arguments that are no JSON object are none, for which the tool reports errors.

        Raises:
            ValueError: there is no call, and ``error_on_no_tool_call`` is set, as LlamaIndex demands.
        """
        del kwargs
        blocks = [block for block in response.message.blocks if isinstance(block, ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            raise ValueError("the model called no tool")
        return [
            ToolSelection(
                tool_id=block.tool_call_id or "",
                tool_name=block.tool_name,
                tool_kwargs=block.tool_kwargs if isinstance(block.tool_kwargs, dict) else {},
            )
            for block in blocks
        ]

    def _prompt(self, prompt: str, formatted: bool) -> str:
        return prompt if formatted else self.completion_to_prompt(prompt)

    def _completion(self, completion: Generation) -> CompletionResponse:
        return CompletionResponse(text=completion.text, raw=self._raw(completion))

    def _message(self, completion: Generation) -> ChatResponse:
        return ChatResponse(message=_answer(completion.text, completion.tool_calls), raw=self._raw(completion))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text."""
        return self._completion(self._run(self.lm.generate, self._prompt(prompt, formatted), kwargs)[0])

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Continue a text, without blocking the event loop."""
        return self._completion((await self._run(self.lm.agenerate, self._prompt(prompt, formatted), kwargs))[0])

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Iterator[CompletionResponse]:
        """Continue a text piece by piece."""
        pieces = self._pieces(lambda: self._run(self.lm.stream, self._prompt(prompt, formatted), kwargs))
        return (self._completed(text, piece, done) for text, piece, done in pieces)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> AsyncIterator[CompletionResponse]:
        """Continue a text piece by piece, without blocking the event loop."""
        pieces = self._apieces(lambda: self._run(self.lm.astream, self._prompt(prompt, formatted), kwargs))
        return (self._completed(text, piece, done) async for text, piece, done in pieces)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Generate the next message of a conversation."""
        return self._message(self._chat(self.lm.chat, messages, kwargs)[0])

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Generate the next message of a conversation, without blocking the event loop."""
        return self._message((await self._chat(self.lm.achat, messages, kwargs))[0])

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> Iterator[ChatResponse]:
        """Generate the next message of a conversation piece by piece."""
        pieces = self._pieces(lambda: self._chat(self.lm.stream, messages, kwargs))
        return (self._answered(text, piece, done) for text, piece, done in pieces)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> AsyncIterator[ChatResponse]:
        """Generate the next message of a conversation piece by piece, without blocking the event loop."""
        pieces = self._apieces(lambda: self._chat(self.lm.astream, messages, kwargs))
        return (self._answered(text, piece, done) async for text, piece, done in pieces)

    def _pieces(self, start: Callable[[], Any]) -> Iterator[tuple[str, str, Generation | None]]:
        """Start a stream; yield the text so far and its last piece, and after the last piece what was generated."""
        stream, text = start(), ""
        for piece in stream:
            text += piece
            yield text, piece, None
        yield text, "", stream.result

    async def _apieces(self, start: Callable[[], Any]) -> AsyncIterator[tuple[str, str, Generation | None]]:
        stream, text = start(), ""
        async for piece in stream:
            text += piece
            yield text, piece, None
        yield text, "", stream.result

    def _completed(self, text: str, piece: str, done: Generation | None) -> CompletionResponse:
        return CompletionResponse(text=text, delta=piece, raw=None if done is None else self._raw(done))

    def _answered(self, text: str, piece: str, done: Generation | None) -> ChatResponse:
        calls, raw = ([], None) if done is None else (done.tool_calls, self._raw(done))
        return ChatResponse(message=_answer(text, calls), delta=piece, raw=raw)

    def _raw(self, done: Generation) -> dict[str, Any]:
        return {**facts(self.lm, done), "usage": usage_of(done)}


class GerundRetriever(BaseRetriever):
    """Finds chunks in an index of your documents; see ``gerund.open_index``.

    >>> import gerund
    >>> index = gerund.open_index(None, gerund.load())
    >>> _ = index.add_documents([gerund.Document("rail", "Trains need rails.")])
    >>> [found] = GerundRetriever(index, k=1).retrieve("trains")
    >>> found.text, found.metadata["source"]
    ('Trains need rails.', 'rail')
    """

    def __init__(self, index: Index | str | Path, k: int = 4, *, callback_manager: Any = None, **search: Any) -> None:
        """Search an index.

        Args:
            index: an index, or its location.
            k: maximum number of chunks.
            callback_manager: LlamaIndex's.
            **search: further arguments of ``Index.search``, such as ``mode`` or ``filter``.
        """
        self._index = index_of(index)
        self._search = {"k": k, **search}
        super().__init__(callback_manager=callback_manager)

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        nodes = []
        for hit in self._index.search(query_bundle.query_str, **self._search):
            metadata = hit.to_dict()
            node = TextNode(
                text=metadata.pop("text"),
                id_=f"{hit.source}:{hit.start}-{hit.end}",
                start_char_idx=hit.start,
                end_char_idx=hit.end,
                metadata=metadata,
                # A model reads where a text comes from, and no scores.
                excluded_llm_metadata_keys=[name for name in metadata if name not in ("source", "title", "heading")],
                excluded_embed_metadata_keys=list(metadata),
            )
            nodes.append(NodeWithScore(node=node, score=hit.score))
        return nodes

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return await asyncio.to_thread(self._retrieve, query_bundle)


class GerundRerank(BaseNodePostprocessor):
    """Keeps the nodes that are most relevant to a query, best first, with their scores.

    Scores that the nodes have, such as those of a retriever, count too; see ``lm.rerank``.
    """

    model_config = ConfigDict(extra="forbid")

    lm: Any = Field(exclude=True, description="A model in memory, or what gerund.load takes.")
    top_n: int | None = Field(default=3, description="Number of nodes to keep; None for all that have a text.")
    by: str | None = Field(default=None, description="lift, vectors and others; see lm.rerank.")
    weight: float | None = Field(default=None, description="What it counts beside the nodes' scores, from 0 to 1.")
    deadline: float | None = Field(default=None, description="Seconds after which no further node is read.")

    def __init__(self, lm: Model = None, **settings: Any) -> None:
        super().__init__(lm=model_of(lm), **settings)

    @classmethod
    def class_name(cls) -> str:
        """Return this class's name in LlamaIndex."""
        return "GerundRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        if not nodes:
            return []
        query = "" if query_bundle is None else query_bundle.query_str
        texts = [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
        scores = [node.score for node in nodes]
        stage = {"weight": self.weight, "deadline": self.deadline}
        ranking = most_relevant(self.lm, query, texts, self.top_n, self.by, scores, **stage)  # type: ignore[arg-type]
        return [NodeWithScore(node=nodes[place].node, score=score) for place, score in ranking]


def _conversation(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as gerund takes them; it rejects images by name."""
    conversation = []
    for message in messages:
        blocks = [block for block in message.blocks if not isinstance(block, ToolCallBlock)]
        parts = [
            {"type": "text", "text": block.text} if isinstance(block, TextBlock) else {"type": block.block_type}
            for block in blocks
        ]
        text = parts[0]["text"] if len(parts) == 1 and "text" in parts[0] else parts
        calls = [_call(block) for block in message.blocks if isinstance(block, ToolCallBlock)]
        conversation.append(
            {"role": message.role.value, "content": text if parts else "", **message.additional_kwargs}
            | ({"tool_calls": calls} if calls else {})
        )
    return conversation


def _call(block: ToolCallBlock) -> dict[str, Any]:
    given = block.tool_kwargs
    arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
    return ToolCall(block.tool_name, arguments, block.tool_call_id or "").message


def _answer(text: str, calls: Sequence[ToolCall] = ()) -> ChatMessage:
    blocks = [
        ToolCallBlock(
            tool_call_id=call.id,
            tool_name=call.name,
            tool_kwargs=json.loads(call.arguments) if call.is_valid else call.arguments,
        )
        for call in calls
    ]
    return ChatMessage(
        role=MessageRole.ASSISTANT, blocks=[*([TextBlock(text=text)] if text or not blocks else []), *blocks]
    )
