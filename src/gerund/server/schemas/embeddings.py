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
from gerund.settings.ranking import RelevanceMeasure


class EmbeddingRequest(RequestBody):
    """Texts to encode, or token ids of this model's tokenizer."""

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
    multi: bool | None = None
    """Return a vector for each token of a text instead, for late interaction: a list of lists."""
    prompt: Annotated[str, Field(max_length=10_000)] | None = None
    """Precedes every text."""
    prompt_name: Annotated[str, Field(max_length=200)] | None = None
    """The name of one of the encoder's prompts."""
    input_type: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """What the texts are: ``query`` or ``document`` (also Cohere's ``search_query``, ``search_document`` and NVIDIA's
    ``passage``), or the name of one of the encoder's prompts."""
    task: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """Its name in Jina's API, such as ``retrieval.query``."""
    truncate: bool | None = None
    """Truncate a text that is too long, instead of an error."""
    truncate_prompt_tokens: Literal[-1] | None = None
    """Its name in vLLM."""
    normalize: bool | None = None
    """Must equal the encoder's setting, since other vectors belong to another encoder."""
    normalized: bool | None = None
    """Its name in Jina's API."""

    @property
    def truncates(self) -> bool:
        """Whether a text that is too long is truncated."""
        return bool(self.truncate) or self.truncate_prompt_tokens == -1

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        """The texts or lists of token ids."""
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return self.input


class Document(Body):
    """A document that is ranked by its text; other fields are ignored."""

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
    """Its name in Voyage's and other APIs."""
    return_documents: bool | None = None
    max_tokens_per_doc: Count | None = None
    by: RelevanceMeasure | None = None
    """How relevance is measured; default: the model's measure."""
    scores: Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(max_length=MOST_TEXTS)] | None = None
    """The score of each document in a first stage, which is fused with the measure."""
    weight: Annotated[float, Field(ge=0, le=1)] | None = None
    """What the measure counts beside ``scores``."""
    deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds after which no further document is read; the others come last."""

    @property
    def texts(self) -> list[str]:
        """The documents as texts."""
        return [item if isinstance(item, str) else item.text for item in self.documents]

    @property
    def most(self) -> int | None:
        """The number of documents to return; None for all."""
        if self.top_n is not None and self.top_k is not None and self.top_n != self.top_k:
            raise ApiError("top_n and top_k both say how many documents to return; leave one out", param="top_k")
        return self.top_n or self.top_k


class TeiRerankRequest(RequestBody):
    """A reranking request in the form of text-embeddings-inference."""

    without_effect: ClassVar[Accepted | None] = {"truncation_direction": ("Right", "right")}
    query: Text
    texts: Texts
    return_text: bool | None = None
    raw_scores: bool | None = None
    truncate: bool | None = None


def _kind_of_rerank(body: Any) -> str:
    """Return which form a body has, so that errors are about that form."""
    return "tei" if isinstance(body, TeiRerankRequest) or (isinstance(body, dict) and "texts" in body) else "cohere"


AnyRerankRequest = Annotated[
    Annotated[RerankRequest, Tag("cohere")] | Annotated[TeiRerankRequest, Tag("tei")], Discriminator(_kind_of_rerank)
]


class ScoreRequest(RequestBody):
    """Texts to score: continuations of a prefix, or pairs of similar texts."""

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
    """A text or a conversation to tokenize."""

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
    """Token ids to decode."""

    tokens: Annotated[list[TokenId], Field(max_length=65536, fail_fast=True)]


class SearchRequest(RequestBody):
    """A query to the served index."""

    query: Text
    k: Annotated[int, Field(ge=1, le=1000)] | None = None
    mode: Literal["hybrid", "words", "vectors"] | None = None
    filter: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    """A condition in SQL on the columns of the index."""
    weight: Annotated[float, Field(ge=0, le=1)] | None = None
    """Weight of the vectors in a hybrid search; default: the tuned one."""
    rerank: Annotated[int, Field(ge=0, le=1000)] | None = None
    """How many of the first hits are re-ranked, and as in `gerund search`:"""
    rerank_by: RelevanceMeasure | None = None
    rerank_weight: Annotated[float, Field(ge=0, le=1)] | None = None
    rerank_deadline: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None


class AttentionRequest(RequestBody):
    """A text whose attention maps are requested."""

    text: Annotated[str, Field(min_length=1, max_length=2000)]
    plan: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    """An attention plan; default: the encoder's."""
    k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    k0: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    sink_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    skips: Annotated[int, Field(ge=0, lt=2**31)] | None = None
