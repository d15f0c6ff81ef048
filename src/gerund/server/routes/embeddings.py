"""Embeddings, reranking, scores, search and attention maps: the bodies of requests, and the routes."""

import base64
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from fastapi import APIRouter, Header, Request, Response
from pydantic import Discriminator, Field, Tag

from gerund.checks import check_dimensions
from gerund.engine.config import EngineFuture
from gerund.engine.engine import text_of_ids
from gerund.errors import ConfigError, FingerprintError, TextError
from gerund.inference.sentence_encoder import SentenceEncoder
from gerund.inference.text_ids import beginnings, encode_texts
from gerund.inference.tokens import Overflow, check_unicode
from gerund.models.kinds import is_encoder_decoder
from gerund.models.vectors import compared, unit
from gerund.retrieval.documents import Chunking
from gerund.scoring.names import check_first_stage, check_relevance
from gerund.server.bodies import MOST_TEXTS, Accepted, Body, Count, Ids, ManyIds, RequestBody, Text, Texts
from gerund.server.config import FINGERPRINT_HEADER
from gerund.server.errors import MISMATCH, ApiError, api_error, blamed, errors_about, unsupported
from gerund.server.generation_bodies import ScorerName
from gerund.server.service import RequestContext, Served, Service
from gerund.settings.plan import AttentionPlan
from gerund.settings.ranking import RelevanceMeasure, RerankKeywords
from gerund.types import EncodeResult, RerankCost

if TYPE_CHECKING:
    from gerund.inference.inspection import AttentionInspection
    from gerund.language_model import LanguageModel


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


router = APIRouter(tags=["representation"])

# What encoders and other servers call queries and documents.
_KINDS = (
    ("query", "search_query", "retrieval.query", "retrieval_query"),
    ("document", "passage", "search_document", "retrieval.passage", "retrieval_document"),
)
# At most this many texts, with this many characters together, are tokenized in the event loop.
_FEW, _CHARACTERS = 5, 2048
# Tokens of a chunk that a search re-ranks, for the queue.
_CHUNK = Chunking().tokens
# Tokens of a text in `/v1/attention`, whose maps have a number per pair of tokens; and decimals of these numbers.
_MAP_TOKENS = 64
_DIGITS = 4
_PLAN_SETTINGS = ("k", "k0", "sink_tokens", "skips")


@router.post("/v1/embeddings", responses=MISMATCH)
async def embeddings(
    body: EmbeddingRequest,
    request: Request,
    response: Response,
    service: Served,
    x_gerund_fingerprint: Annotated[str | None, Header(max_length=64)] = None,
) -> dict[str, Any]:
    """Encode texts.

    With the header ``X-Gerund-Fingerprint``, another fingerprint is an error: a collection never mixes vectors of two
    encoders.
    """
    service.require_model(body.model)
    _check_normalize(body, service)
    prompt_name, prompt_param = _prompt_name(body, service)
    with errors_about("dimensions"):
        most = service.encoder.dimensions
        check_dimensions(body.dimensions, most)  # a fingerprint would be made for any number
        fingerprint = service.fingerprint(None if body.dimensions == most else body.dimensions)
    expected = fingerprint if x_gerund_fingerprint is None else x_gerund_fingerprint.strip()
    if expected != fingerprint:
        raise FingerprintError(
            f"the vectors of this server have the fingerprint {fingerprint}, and {expected} was asked for: another "
            "model, adapter, plan or number of dimensions; do not mix the two"
        )
    response.headers[FINGERPRINT_HEADER] = fingerprint
    async with service.context(request) as context:
        if body.multi:
            return await _token_vectors(service, context, body, prompt_name)
        result = await encode_inputs(
            service,
            context,
            body.inputs,
            param="input",
            prompt=body.prompt,
            prompt_name=prompt_name,
            prompt_param=prompt_param,
            dimensions=body.dimensions,
            truncate=body.truncates,
        )
    encoded = [_embedding(vector_D, body.encoding_format) for vector_D in result.vectors]
    return _listed(service, encoded, sum(result.token_counts), fingerprint)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: RerankRequest, request: Request, service: Served) -> dict[str, Any]:
    """Order documents by how relevant they are to a query, the most relevant first."""
    service.require_model(body.model)
    texts, most = body.texts, body.most
    stage = {"scores": body.scores, "weight": body.weight, "deadline": body.deadline}
    scores, tokens, cost = await _relevance(
        service, request, body.query, texts, body.by, most=body.max_tokens_per_doc, stage=stage
    )
    order = np.argsort(-scores, kind="stable")[:most]
    results: list[dict[str, Any]] = [{"index": int(index), "relevance_score": float(scores[index])} for index in order]
    if body.return_documents:
        results = [{**result, "document": {"text": texts[result["index"]]}} for result in results]
    version = "1" if request.url.path.startswith("/v1") else "2"
    return {
        "id": uuid.uuid4().hex,
        "model": service.names[0],
        "results": results,
        "usage": {"total_tokens": tokens},
        "rerank": cost.to_dict(),
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
    }


@router.post("/rerank", response_model=None)
async def rerank_any(
    body: AnyRerankRequest, request: Request, service: Served
) -> dict[str, Any] | list[dict[str, Any]]:
    """Rerank documents, or texts in the form of text-embeddings-inference, which returns a list."""
    if isinstance(body, RerankRequest):
        return await rerank(body, request, service)
    service.require_model(body.model)
    truncate = body.truncate is not False
    scores, *_ = await _relevance(service, request, body.query, body.texts, None, param="texts", truncate=truncate)
    order = [int(index) for index in np.argsort(-scores, kind="stable")]
    results: list[dict[str, Any]] = [{"index": index, "score": float(scores[index])} for index in order]
    return [{**result, "text": body.texts[result["index"]]} for result in results] if body.return_text else results


@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request, service: Served) -> dict[str, Any]:
    """Score how well texts follow a prefix, or how similar pairs of texts are."""
    service.require_model(body.model)
    if (body.prefix is None) == (body.text_1 is None):
        raise ApiError("give either prefix with continuations, or text_1 with text_2", param="prefix")
    score_all = _continuation_scores if body.prefix is not None else _pair_scores
    form, others = ("text_1", ["continuations", "scorer"]) if body.prefix is None else ("prefix", ["text_2"])
    for name in others:
        if getattr(body, name) is not None:
            raise ApiError(f"{name} cannot go with {form}; leave it out", param=name)
    values, tokens = await score_all(service, request, body)
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "model": service.names[0],
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }


@router.post("/v1/search")
async def search(body: SearchRequest, request: Request, service: Served) -> dict[str, Any]:
    """Find the chunks of the served index that match a query best."""
    service.require_model(body.model)
    if service.index is None:
        raise ApiError(
            "no index is served; make one with gerund index FOLDER -o my.index, and start with --index my.index",
            404,
            code="no_index",
        )
    stages = [name for name in RerankKeywords.__annotations__ if name != "rerank"]
    asked = {name: getattr(body, name) for name in ("filter", "weight", "rerank", *stages)}
    how = {"mode": body.mode or "hybrid", **{name: value for name, value in asked.items() if value is not None}}

    def param_of(error: Exception) -> str:
        return next((field for field in (*stages, "filter", "weight") if field in str(error)), "query")

    async with service.context(request) as context:
        with errors_about(param_of):
            work = partial(service.with_index, lambda index: index.search(body.query, body.k or 10, **how))
            hits = await context.call(work, tokens=len(body.query) // 4 + 1 + (body.rerank or 0) * _CHUNK)
    return {
        "object": "list",
        "model": service.names[0],
        "index": PurePath(str(service.settings.index)).name,
        "data": [{"object": "search_result", **hit.to_dict()} for hit in hits],
        "rerank": None if hits.rerank is None else hits.rerank.to_dict(),
    }


@router.post("/v1/attention")
async def attention(body: AttentionRequest, request: Request, service: Served) -> dict[str, Any]:
    """Return each layer's attention weights for a text, averaged over heads, with causal attention and with a plan.

    A row is a query token, a column a key token; rows add up to one.
    """
    service.require_model(body.model)
    if is_encoder_decoder(service.lm.model):
        raise ApiError("no attention plan applies to a model with an encoder of its own", code="not_with_this_model")
    async with service.context(request) as context:
        with errors_about(lambda error: "text" if "token" in str(error) else "plan"):
            encoder = await context.run(lambda: _with_plan(service.lm.full, body))
            from gerund.inference.inspection import inspect_attention  # which imports torch

            inspection = await context.call(
                lambda: inspect_attention(encoder.runtime, [body.text], longest=_MAP_TOKENS), tokens=2 * _MAP_TOKENS
            )
    return {"object": "attention", "model": service.names[0], **_attention(encoder, inspection)}


# ------------------------------------------------------------------------------------------------------- embeddings


async def _token_vectors(
    service: Service, context: RequestContext, body: EmbeddingRequest, prompt_name: str | None
) -> dict[str, Any]:
    """Return the token vectors of texts; queries are those with the prompt of queries."""
    lm, texts = service.encoder, body.inputs
    refused = {
        "dimensions": body.dimensions is not None,
        "prompt": body.prompt is not None,
        "encoding_format": body.encoding_format == "base64",
        "input": any(not isinstance(text, str) for text in texts),
    }
    if named := next((name for name, is_given in refused.items() if is_given), None):
        raise ApiError(
            f"multi returns lists of numbers for texts, whole and without a prompt of yours: {named}", param=named
        )
    if isinstance(lm, SentenceEncoder):
        raise unsupported("multi", "multi: this encoder gives one vector for a whole text")
    asked = "query" in (prompt_name, body.prompt_name) or (body.input_type or body.task) in _KINDS[0]
    overflow: Overflow = "truncate" if body.truncates else "error"
    try:
        reader = lm.token_reader()
        read = partial(reader.tokens, texts, is_query=asked, overflow=overflow, warn=False)  # type: ignore[arg-type]
        tokens = await context.run(read)
        count = sum(len(text) for text in tokens if text is not None)
        vectors = await context.call(lambda: reader.vectors(tokens), tokens=count, encodes=True)
    except TextError as error:
        raise _about_text(error, "input") from error
    except Exception as error:
        raise api_error(error, "input") from error
    return _listed(service, [states.tolist() for states in vectors], count, service.fingerprint())


def _listed(service: Service, embeddings: Sequence[Any], tokens: int, fingerprint: str) -> dict[str, Any]:
    return {
        "object": "list",
        "model": service.names[0],
        "data": [{"object": "embedding", "index": index, "embedding": item} for index, item in enumerate(embeddings)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "fingerprint": fingerprint,
    }


def _check_normalize(body: EmbeddingRequest, service: Service) -> None:
    """Raise an error for vectors of other lengths than the encoder's, which would have the same fingerprint."""
    normalizes = service.encoder.encoder.normalize
    for name in ("normalize", "normalized"):
        if getattr(body, name) not in (None, normalizes):
            message = (
                f"{name} is {str(normalizes).lower()} in this encoder, and other vectors must not mix with its own"
            )
            raise unsupported(name, f"{message}; leave it out")


def _prompt_name(body: EmbeddingRequest, service: Service) -> tuple[str | None, str]:
    """Return the name of the prompt to put before the texts, and the field that it comes from."""
    fields = ("prompt", "prompt_name", "input_type", "task")
    params = [name for name in fields if getattr(body, name) is not None]
    if len(params) > 1 and params != ["prompt", "prompt_name"]:  # for these two the library raises an error
        raise ApiError(f"{params[0]} and {params[1]} both say which prompt to use; leave one out", param=params[1])
    if body.prompt is not None or body.prompt_name is not None:
        return body.prompt_name, "prompt_name"
    kind, prompts = body.input_type or body.task, service.encoder.encoder.prompts
    if kind is None:
        return None, "prompt_name"
    if kind in prompts:
        return kind, params[0]
    for names in _KINDS:
        if kind in names:
            return next((name for name in names if name in prompts), None), params[0]
    known = ", ".join(repr(name) for name in dict.fromkeys((*prompts, "query", "document")))
    raise ApiError(f"{params[0]}: this encoder has no prompt for {kind!r}; it has {known}", param=params[0])


def _embedding(vector_D: np.ndarray, encoding: str | None) -> str | list[float]:
    if encoding == "base64":
        return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
    listed: list[float] = vector_D.astype(np.float32).tolist()
    return listed


async def encode_inputs(
    service: Service,
    context: RequestContext,
    inputs: Sequence[str | list[int]],
    *,
    param: str,
    prompt_param: str = "prompt_name",
    truncate: bool = False,
    params: Sequence[str] | None = None,
    **options: Any,
) -> EncodeResult:
    """Encode texts or token ids of the field ``param``, or of ``params``, one per text."""

    def work() -> EngineFuture[EncodeResult]:
        texts = [
            item if isinstance(item, str) else _text_of(service, item, param, index)
            for index, item in enumerate(inputs)
        ]
        overflow: Overflow = "truncate" if truncate else "error"
        return context.hold(
            service.encoding.submit_encode(texts, overflow=overflow, deadline=context.deadline, **options)
        )

    # Few characters are tokenized in less time than a thread takes to start.
    texts = [options.get("prompt") or "", *inputs]
    has_ids = not all(isinstance(item, str) for item in inputs)
    is_short = len(texts) <= _FEW and not has_ids and sum(map(len, texts)) <= _CHARACTERS
    try:
        return await context.result(work() if is_short else await context.run(work))
    except TextError as error:
        if params is not None and error.index is not None:
            raise ApiError(f"{params[error.index]} {error.reason}", param=params[error.index]) from error
        place = param if error.index is None or len(inputs) == 1 else f"{param}.{error.index}"
        begin = f"This model's maximum context length is {service.encoder.max_length} tokens. However, "
        raise _about_text(error, place, begin) from error
    except ConfigError as error:
        prompt_field = "prompt" if options.get("prompt_name") is None else prompt_param
        raise api_error(error, "dimensions" if "dimensions" in str(error) else prompt_field) from error
    except Exception as error:
        raise api_error(error, param) from error


def _about_text(error: TextError, param: str, begin: str = "") -> ApiError:
    """Return an error about a text as clients get it; ``begin`` is put before the message of one that is too long."""
    if not error.exceeds_context:
        return api_error(error, param)
    message = f"{begin}{str(error).partition(';')[0]}; shorten it, or send truncate: true"
    return ApiError(message, code="context_length_exceeded", param=param)


def _text_of(service: Service, ids: list[int], param: str, index: int) -> str:
    """Return the text of token ids; ids of another tokenizer would give meaningless vectors and are an error."""
    size = len(service.encoder.tokenizer)
    hint = "send texts instead (in langchain-openai: check_embedding_ctx_length=False)"
    wrong = next((token for token in ids if token >= size), None)
    if wrong is not None:
        message = f"{param}.{index} has the token id {wrong}, and this model's are 0 to {size - 1}"
        raise ApiError(f"{message}; {hint}", param=param, code="foreign_token_ids")
    with errors_about(param):
        text = text_of_ids(service.encoder.tokenizer, ids)
    if text is None:
        message = f"{param}.{index} has token ids that this model's tokenizer would not give for any text"
        raise ApiError(f"{message}; {hint}", param=param, code="foreign_token_ids")
    return text


# ----------------------------------------------------------------------------------------------- ranking and scores


async def _relevance(
    service: Service,
    request: Request,
    query: str,
    documents: Sequence[str],
    by: Any,
    *,
    param: str = "documents",
    most: int | None = None,
    truncate: bool = True,
    stage: Mapping[str, Any] | None = None,
) -> tuple[np.ndarray, int, RerankCost]:
    """Return the score of each document ``(N,)``, the tokens, of which ``most`` per document count, and the cost.

    ``stage`` has what ``rerank`` takes of a first stage.
    """
    by = by or service.lm.default_measure()
    lm: Any = service.encoder if by == "vectors" else service.lm
    stage = {name: value for name, value in (stage or {}).items() if value is not None}
    with errors_about(lambda error: "query" if "query" in str(error) else param):
        check_relevance(query, documents, None, by)
    with errors_about(lambda error: next((name for name in ("weight", "deadline") if name in str(error)), "scores")):
        check_first_stage(stage.get("scores"), len(documents), stage.get("weight"), None, stage.get("deadline"))
    if stage and isinstance(lm, SentenceEncoder):
        name = next(iter(stage))
        raise unsupported(name, f"{name} is not supported by this encoder; leave it out")
    async with service.context(request) as context:
        if most is not None:
            texts, most_each = documents, most
            with errors_about(param):
                for index, text in enumerate(texts):
                    check_unicode("text", text, index)
                documents = await context.run(lambda: beginnings(lm.tokenizer, texts, most_each))
        if by == "vectors" and not stage:
            start = time.monotonic()
            cosines_N, tokens = await _cosines(service, context, query, documents, param, truncate)
            count = len(documents)
            return cosines_N, tokens, RerankCost(by, count, count, round(time.monotonic() - start, 4))
        tokens = await context.run(lambda: _count(lm, [query, *documents]))
        with errors_about(lambda error: "query" if str(error).startswith("the query") else "by"):
            work = partial(lm.rerank, query, documents, by=by, **stage)
            ranking = await context.call(work, tokens=tokens, encodes=by == "vectors")
    scores_N = np.empty(len(documents))
    scores_N[ranking.indices] = ranking.scores
    return scores_N, tokens, RerankCost.of(ranking, len(documents))


async def _cosines(
    service: Service, context: RequestContext, query: str, documents: Sequence[str], param: str, truncate: bool
) -> tuple[np.ndarray, int]:
    """Return the similarity of a query and each document ``(N,)`` as ``rerank`` does, and the number of tokens."""
    prompts = service.encoder.encoder.prompts
    results = [
        await encode_inputs(
            service, context, texts, param=field, prompt_name=job if job in prompts else None, truncate=truncate
        )
        for texts, field, job in (([query], "query", "query"), (documents, param, "document"))
    ]
    cosines_N = compared(results[1].vectors, results[0].vectors[:1], service.encoder.encoder.similarity)[:, 0]
    return cosines_N, sum(sum(result.token_counts) for result in results)


async def _continuation_scores(service: Service, request: Request, body: ScoreRequest) -> tuple[list[float], int]:
    lm, prefix, texts = service.lm, body.prefix or "", body.continuations
    if texts is None:
        raise ApiError("continuations: give the texts that are scored behind the prefix", param="continuations")
    async with service.context(request) as context:
        with errors_about(lambda error: blamed(error, body.model_fields_set) or "continuations"):
            tokens = await context.run(lambda: _count(lm, [prefix, *texts]))
            [scores] = await context.call(lambda: lm.score([prefix], [texts], scorer=body.scorer), tokens=tokens)
    return [max(-1e9, min(1e9, float(value))) for value in scores], tokens  # JSON has no infinity


async def _pair_scores(service: Service, request: Request, body: ScoreRequest) -> tuple[list[float], int]:
    if body.text_2 is None:
        raise ApiError("text_2: give the text or texts that text_1 is compared with", param="text_2")
    params: dict[str, str] = {}  # by text, so that each is encoded once
    sides: list[list[str]] = []
    for field, texts in (("text_1", body.text_1), ("text_2", body.text_2)):
        listed = [texts] if isinstance(texts, str) else list(texts or ())
        sides.append(listed)
        for number, text in enumerate(listed):
            params.setdefault(text, field if isinstance(texts, str) else f"{field}.{number}")
    left, right = sides
    if len(left) == 1:
        left = left * len(right)
    elif len(right) == 1:
        right = right * len(left)
    if len(left) != len(right):
        raise ApiError(f"text_1 has {len(left)} texts and text_2 {len(right)}; give as many, or one", param="text_2")
    async with service.context(request) as context:
        result = await encode_inputs(
            service, context, list(params), param="text_1", truncate=True, params=list(params.values())
        )
    vectors = dict(zip(params, unit(result.vectors), strict=True))
    values = [float(vectors[first] @ vectors[second]) for first, second in zip(left, right, strict=True)]
    return values, sum(result.token_counts)


def _count(lm: Any, texts: Sequence[str]) -> int:
    for index, text in enumerate(texts):
        check_unicode("text", text, index)
    return sum(len(item.ids) for item in encode_texts(lm.tokenizer, list(texts)))


# -------------------------------------------------------------------------------------------------------- attention


def _with_plan(lm: "LanguageModel", body: AttentionRequest) -> "LanguageModel":
    settings = {name: value for name in _PLAN_SETTINGS if (value := getattr(body, name)) is not None}
    if body.plan is None:
        if settings:
            name = next(iter(settings))
            raise ApiError(f"{name} is a setting of a plan; name the plan", param=name)
        return lm
    return lm.with_encoder(replace(lm.encoder, attention=AttentionPlan(body.plan, **settings)))


def _attention(encoder: "LanguageModel", inspection: "AttentionInspection") -> dict[str, Any]:
    from gerund.inference.inspection import sink_fraction, token_labels  # which imports torch

    plan = encoder.encoder.with_defaults(encoder.n_layers).attention
    defaults = AttentionPlan(plan.name)
    settings = [
        f"{name}={value}"
        for name in _PLAN_SETTINGS
        if (value := getattr(plan, name)) is not None and (name == "k" or value != getattr(defaults, name))
    ]
    after: dict[int, list[tuple[Any, float]]] = {}
    for item, sink in zip(inspection.after, sink_fraction(inspection.after), strict=True):
        after.setdefault(item.layer, []).append((item.weights, sink))
    layers = [
        {
            "before": _rows(item.weights),
            "after": [_rows(weights) for weights, _ in after[item.layer]],
            "sink_before": round(sink, _DIGITS),
            "sink_after": round(sum(sink for _, sink in after[item.layer]) / len(after[item.layer]), _DIGITS),
        }
        for item, sink in zip(inspection.before, sink_fraction(inspection.before), strict=True)
    ]
    return {
        "plan": ", ".join([plan.name, *settings]),
        "tokens": token_labels(encoder.tokenizer, inspection.ids[0]),
        "cut": bool(inspection.cut),
        "layers": layers,
    }


def _rows(weights_TT: Any) -> list[list[float]]:
    return [[round(value, _DIGITS) for value in row] for row in weights_TT.tolist()]
