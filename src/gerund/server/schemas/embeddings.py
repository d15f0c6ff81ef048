"""Bodies of requests for embeddings, rankings, scores, search and tokens."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from gerund.server.errors import ApiError
from gerund.server.schemas.base import (
    MOST_TEXTS,
    Accepted,
    Body,
    Count,
    Ids,
    ManyIds,
    RequestBody,
    Text,
    Texts,
    TokenId,
)
from gerund.server.schemas.generation import Message, ScorerName


class EmbeddingRequest(RequestBody):
    """Texts, or token ids of this model's own tokenizer, to be turned into vectors."""

    without_effect: ClassVar[Accepted | None] = {
        # vLLM and Infinity
        "add_special_tokens": (True,),
        "modality": ("text",),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "mm_processor_kwargs": ({},),
        # Jina, Voyage, Mistral
        "embedding_type": ("float",),
        "output_dtype": ("float",),
        "late_chunking": (False,),
    }
    input: Text | Texts | Ids | ManyIds
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Count | None = None
    prompt: Annotated[str, Field(max_length=10_000)] | None = None
    """Put before every text."""
    prompt_name: Annotated[str, Field(max_length=200)] | None = None
    """The name of one of the encoder's prompts, which is put there."""
    input_type: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """What the texts are: ``query`` or ``document`` (also Cohere's ``search_query``, ``search_document`` and NVIDIA's
    ``passage``), or the name of one of the encoder's prompts."""
    task: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """The same in Jina's words, such as ``retrieval.query``."""
    truncate: bool | None = None
    """Cut a text that is too long, instead of refusing it."""
    truncate_prompt_tokens: Literal[-1] | None = None
    """The same in vLLM's words."""
    normalize: bool | None = None
    """As the encoder's own setting; anything else would be vectors of another encoder."""
    normalized: bool | None = None
    """The same in Jina's words."""

    @property
    def truncates(self) -> bool:
        """Whether a text that is too long is cut."""
        return bool(self.truncate) or self.truncate_prompt_tokens == -1

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """What is to be read, one or many."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return self.input


class Document(Body):
    """A document that is ranked by its text; whatever else it has is the client's own."""

    without_effect = None
    text: Text


class RerankRequest(RequestBody):
    """Documents to be ordered by their relevance to a query."""

    without_effect: ClassVar[Accepted | None] = {
        # Cohere
        "rank_fields": (["text"], []),
        "max_chunks_per_doc": (10,),
        "relevant_spans": (False,),
        # Jina, Voyage, Infinity, vLLM: long documents are cut, as here
        **dict.fromkeys(("truncation", "truncate", "add_special_tokens"), (True,)),
        "truncate_prompt_tokens": (-1,),
        **dict.fromkeys(("raw_scores", "return_embeddings"), (False,)),
        "mm_processor_kwargs": ({},),
    }
    query: Text
    documents: Annotated[list[Text | Document], Field(min_length=1, max_length=MOST_TEXTS, fail_fast=True)]
    top_n: Count | None = None
    top_k: Count | None = None
    """The same in the words of Voyage and others."""
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None
    by: Literal["vectors", "model", "own", "likelihood"] | None = None
    """How relevance is measured."""

    @property
    def texts(self) -> list[str]:
        """The documents as texts."""
        return [one if isinstance(one, str) else one.text for one in self.documents]

    @property
    def most(self) -> int | None:
        """How many documents are returned; None for all."""
        if self.top_n is not None and self.top_k is not None and self.top_n != self.top_k:
            raise ApiError("top_n and top_k both say how many documents to return; leave one out", param="top_k")
        return self.top_n or self.top_k


class TeiRerankRequest(RequestBody):
    """The same in the form of text-embeddings-inference."""

    without_effect: ClassVar[Accepted | None] = {"truncation_direction": ("Right", "right")}
    query: Text
    texts: Texts
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None


def _kind_of_rerank(body: Any) -> str:
    """Return which form a body has, so that what is wrong with it is said of that form."""
    return "tei" if isinstance(body, TeiRerankRequest) or (isinstance(body, dict) and "texts" in body) else "cohere"


AnyRerankRequest = Annotated[
    Annotated[RerankRequest, Tag("cohere")] | Annotated[TeiRerankRequest, Tag("tei")], Discriminator(_kind_of_rerank)
]


class ScoreRequest(RequestBody):
    """How well texts follow a prefix, or how alike two lists of texts are."""

    without_effect: ClassVar[Accepted | None] = {
        "add_special_tokens": (True,),
        "truncate_prompt_tokens": (-1,),
        "mm_processor_kwargs": ({},),
    }
    prefix: str | None = None
    continuations: Texts | None = None
    scorer: ScorerName | None = None
    text_1: Text | Texts | None = None
    text_2: Text | Texts | None = None


class TokenizeRequest(RequestBody):
    """A text or a conversation, as the model reads it."""

    without_effect: ClassVar[Accepted | None] = {
        **dict.fromkeys(("return_token_strs", "with_pieces", "parse_special"), (False,)),
        "tools": ([],),
        "mm_processor_kwargs": ({},),
    }
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestBody):
    """Token ids to be spelled out."""

    tokens: Annotated[list[TokenId], Field(max_length=65536, fail_fast=True)]


class SearchRequest(RequestBody):
    """A query to the index that is served."""

    query: Text
    k: Annotated[int, Field(ge=1, le=1000)] | None = None
    mode: Literal["hybrid", "words", "vectors"] | None = None
    filter: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """A condition in SQL on the columns of the index."""
    weight: Annotated[float, Field(ge=0, le=1)] | None = None
    """Of the vectors in a hybrid search; left out, the model's tuned one."""


class AttentionRequest(RequestBody):
    """A text in which the layers look around."""

    text: Annotated[str, Field(min_length=1, max_length=2000)]
    plan: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """An attention plan; left out, the encoder's own."""
    k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    k0: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    sink_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    skips: Annotated[int, Field(ge=0, lt=2**31)] | None = None
