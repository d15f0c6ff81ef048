"""Embeddings, reranking, scores, search and attention maps."""

import base64
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Header, Request, Response

from gerund.checks import check_dimensions
from gerund.engine.config import Ticket
from gerund.errors import ConfigError, FingerprintError, TextError
from gerund.inference.inspection import AttentionInspection, inspect_attention, sink_fraction, token_labels
from gerund.inference.text_ids import beginnings, encode_texts
from gerund.inference.tokens import check_unicode
from gerund.language_model import LanguageModel
from gerund.models.vectors import compared, unit
from gerund.scoring.names import check_relevance
from gerund.seq2seq_model import Seq2SeqModel
from gerund.server.config import FINGERPRINT_HEADER
from gerund.server.errors import MISMATCH, ApiError, api_error, blamed
from gerund.server.schemas.embeddings import (
    AnyRerankRequest,
    AttentionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    SearchRequest,
)
from gerund.server.service import Claim, Served, Service
from gerund.settings.plan import AttentionPlan
from gerund.types import EncodeResult

router = APIRouter(tags=["representation"])


@router.post("/v1/embeddings", responses=MISMATCH)
async def embeddings(
    body: EmbeddingRequest,
    request: Request,
    response: Response,
    service: Served,
    x_gerund_fingerprint: Annotated[str | None, Header(max_length=64)] = None,
) -> dict[str, Any]:
    """Turn texts into vectors.

    With the header ``X-Gerund-Fingerprint`` vectors of another encoder are refused: a collection is never mixed.
    """
    service.demand_model(body.model)
    _refuse_other_length(body, service)
    prompt_name, named_by = _prompt_name(body, service)
    try:
        own = service.fingerprint(_checked(body.dimensions, service.lm.dimensions))
    except Exception as error:
        raise api_error(error, "dimensions") from error
    if x_gerund_fingerprint is not None and x_gerund_fingerprint.strip() != own:
        raise api_error(
            FingerprintError(
                f"the vectors of this server have the fingerprint {own}, and {x_gerund_fingerprint.strip()} was asked "
                "for: another model, adapter, plan or number of dimensions; do not mix the two"
            )
        )
    async with service.claim(request) as claim:
        found = await encoded(
            service,
            claim,
            body.inputs,
            param="input",
            prompt=body.prompt,
            prompt_name=prompt_name,
            prompt_param=named_by,
            dimensions=body.dimensions,
            truncate=body.truncates,
        )
    response.headers[FINGERPRINT_HEADER] = own
    tokens = sum(found.token_counts)
    return {
        "object": "list",
        "model": service.names[0],
        "data": [
            {"object": "embedding", "index": index, "embedding": _shown(vector_D, body.encoding_format)}
            for index, vector_D in enumerate(found.vectors)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        "fingerprint": own,
    }


def _refuse_other_length(body: EmbeddingRequest, service: Service) -> None:
    """Refuse vectors of another length than the encoder's, which would have the same fingerprint.

    Raises:
        ApiError: they are asked for.
    """
    own = service.lm.encoder.normalize
    for name in ("normalize", "normalized"):
        if getattr(body, name) not in (None, own):
            said = f"{name} is {str(own).lower()} in this encoder, and other vectors must not mix with its own"
            raise ApiError(f"{said}; leave it out", param=name, code="not_supported")


def _prompt_name(body: EmbeddingRequest, service: Service) -> tuple[str | None, str]:
    """Return the name of the prompt to put before the texts, and the field that says so.

    Raises:
        ApiError: two fields say so, or the encoder has no such prompt.
    """
    fields = ("prompt", "prompt_name", "input_type", "task")
    given = [name for name in fields if getattr(body, name) is not None]
    if len(given) > 1 and given != ["prompt", "prompt_name"]:  # these two are refused by the library
        raise ApiError(f"{given[0]} and {given[1]} both say which prompt to use; leave one out", param=given[1])
    if body.prompt is not None or body.prompt_name is not None:
        return body.prompt_name, "prompt_name"
    kind = body.input_type or body.task
    return (None, "prompt_name") if kind is None else (prompt_for(service, kind, given[0]), given[0])


def _checked(dimensions: int | None, most: int) -> int | None:
    """Return how many numbers are kept, after checking it: a fingerprint is made for any number."""
    check_dimensions(dimensions, most)
    return None if dimensions == most else dimensions


def _shown(vector_D: np.ndarray, form: str | None) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
    listed: list[float] = vector_D.astype(np.float32).tolist()
    return listed


# What encoders and servers call the two sides of a search.
_KINDS = (
    ("query", "search_query", "retrieval.query", "retrieval_query"),
    ("document", "passage", "search_document", "retrieval.passage", "retrieval_document"),
)
# What is tokenized in the event loop, the prompt counted as a text.
_FEW, _LETTERS = 5, 2048


async def encoded(
    service: Service,
    claim: Claim,
    inputs: Sequence[str | list[int]],
    *,
    param: str,
    prompt: str | None = None,
    prompt_name: str | None = None,
    prompt_param: str = "prompt_name",
    dimensions: int | None = None,
    truncate: bool = False,
    places: Sequence[str] | None = None,
) -> EncodeResult:
    """Return the vectors of texts.

    Args:
        service: the model.
        claim: the request's.
        inputs: texts, or lists of token ids.
        param: the field that they stand in.
        prompt: put before every text.
        prompt_name: the name of a stored prompt, to be put there.
        prompt_param: the field that says so.
        dimensions: numbers that are kept of each vector.
        truncate: cut texts that are too long, instead of refusing them.
        places: where each text stands in the body, for texts of several fields.

    Raises:
        ApiError: the texts cannot be encoded.
    """

    def work() -> Ticket[EncodeResult]:
        texts = [one if isinstance(one, str) else text_of_ids(service, one, param, at) for at, one in enumerate(inputs)]
        how: dict[str, Any] = {"prompt": prompt, "prompt_name": prompt_name, "dimensions": dimensions}
        return claim.hold(
            service.engine.encode(texts, overflow="truncate" if truncate else "error", deadline=claim.deadline, **how)
        )

    try:
        found = await claim.result(work() if _is_short([prompt or "", *inputs]) else await claim.run(work))
    except TextError as error:
        if places is not None and error.index is not None:
            raise ApiError(f"{places[error.index]} {error.reason}", param=places[error.index]) from error
        place = param if error.index is None or len(inputs) == 1 else f"{param}.{error.index}"
        if error.exceeds_context:
            raise ApiError(
                f"This model's maximum context length is {service.lm.max_length} tokens. However, "
                f"{str(error).partition(';')[0]}; shorten it, or send truncate: true",
                code="context_length_exceeded",
                param=place,
            ) from error
        raise api_error(error, place) from error
    except ConfigError as error:
        named = "prompt" if prompt_name is None else prompt_param
        raise api_error(error, "dimensions" if "dimensions" in str(error) else named) from error
    except Exception as error:
        raise api_error(error, param) from error
    return found


def prompt_for(service: Service, kind: str, param: str) -> str | None:
    """Return the name of the encoder's prompt for a kind of text; None where it reads that kind without one.

    Args:
        service: the model.
        kind: ``query``, ``document``, what other servers call them, or the name of a prompt.
        param: the field that says so.

    Raises:
        ApiError: there is no such kind of text.
    """
    prompts = service.lm.encoder.prompts
    if kind in prompts:
        return kind
    for names in _KINDS:
        if kind in names:
            return next((name for name in names if name in prompts), None)
    known = ", ".join(repr(name) for name in dict.fromkeys((*prompts, "query", "document")))
    raise ApiError(f"{param}: this encoder has no prompt for {kind!r}; it has {known}", param=param)


def _is_short(inputs: Sequence[str | list[int]]) -> bool:
    """Whether texts are tokenized in less time than it takes to hand them to a thread and back."""
    return len(inputs) <= _FEW and all(isinstance(one, str) for one in inputs) and sum(map(len, inputs)) <= _LETTERS


def text_of_ids(service: Service, ids: list[int], param: str, index: int) -> str:
    """Return the text of token ids, after making sure as far as possible that they are this tokenizer's.

    Ids of another tokenizer are the worst that can come: valid numbers, vectors without a meaning.

    Raises:
        ApiError: they are not.
    """
    tokenizer = service.lm.tokenizer
    size = len(tokenizer)
    wrong = next((token for token in ids if token >= size), None)
    hint = "send texts instead (in langchain-openai: check_embedding_ctx_length=False)"
    if wrong is not None:
        raise ApiError(
            f"{param}.{index} has the token id {wrong}, and this model's are 0 to {size - 1}; {hint}",
            param=param,
            code="foreign_token_ids",
        )
    [letter] = encode_texts(tokenizer, ["a"])
    before, after = letter.ids[: letter.before], letter.ids[len(letter.ids) - letter.after :]
    own = list(ids)
    if before and own[: len(before)] == before:
        own = own[len(before) :]
    if after and own[len(own) - len(after) :] == after:
        own = own[: len(own) - len(after)]
    text: str = tokenizer.decode(own, clean_up_tokenization_spaces=False)
    try:
        check_unicode("text", text)
        [again] = encode_texts(tokenizer, [text], specials=False)
    except TextError as error:
        raise api_error(error, param) from error
    if again.ids != own:
        raise ApiError(
            f"{param}.{index} has token ids that this model's tokenizer would not give for any text; {hint}",
            param=param,
            code="foreign_token_ids",
        )
    return text


async def cosines(
    service: Service,
    claim: Claim,
    query: str,
    documents: Sequence[str],
    *,
    param: str = "documents",
    truncate: bool = True,
) -> tuple[np.ndarray, int]:
    """Return the cosine of a query with each document ``(n,)``, and how many tokens were read; as ``rerank`` does.

    Args:
        service: the model.
        claim: the request's.
        query: what is asked.
        documents: what is compared with it.
        param: the field that they stand in.
        truncate: cut texts that are too long, instead of refusing them.

    Raises:
        ApiError: the texts cannot be encoded.
    """
    prompts = service.lm.encoder.prompts
    own = {"query": "query" if "query" in prompts else None, "documents": "document" if "document" in prompts else None}
    asked = await encoded(service, claim, [query], param="query", prompt_name=own["query"], truncate=truncate)
    read = await encoded(service, claim, documents, param=param, prompt_name=own["documents"], truncate=truncate)
    found_N = compared(read.vectors, asked.vectors[:1], service.lm.encoder.similarity)[:, 0]
    return found_N, sum(asked.token_counts) + sum(read.token_counts)


@router.post("/v1/rerank")
@router.post("/v2/rerank")
async def rerank(body: RerankRequest, request: Request, service: Served) -> dict[str, Any]:
    """Order documents by how relevant they are to a query, the most relevant first."""
    service.demand_model(body.model)
    texts, most = body.texts, body.most
    scores, tokens = await _relevance(service, request, body.query, texts, body.by, most=body.max_tokens_per_doc)
    order = np.argsort(-scores, kind="stable")[:most]
    results: list[dict[str, Any]] = [{"index": int(index), "relevance_score": float(scores[index])} for index in order]
    if body.return_documents:
        results = [{**one, "document": {"text": texts[one["index"]]}} for one in results]
    version = "1" if request.url.path.startswith("/v1") else "2"
    return {
        "id": uuid.uuid4().hex,
        "model": service.names[0],
        "results": results,
        "usage": {"total_tokens": tokens},
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
    }


@router.post("/rerank", response_model=None)
async def rerank_any(
    body: AnyRerankRequest, request: Request, service: Served
) -> dict[str, Any] | list[dict[str, Any]]:
    """Do so for documents, or for texts in the form of text-embeddings-inference, which gets a list."""
    if isinstance(body, RerankRequest):
        return await rerank(body, request, service)
    service.demand_model(body.model)
    truncate = body.truncate is not False
    scores, _ = await _relevance(service, request, body.query, body.texts, None, param="texts", truncate=truncate)
    order = [int(index) for index in np.argsort(-scores, kind="stable")]
    results: list[dict[str, Any]] = [{"index": index, "score": float(scores[index])} for index in order]
    return [{**one, "text": body.texts[one["index"]]} for one in results] if body.return_text else results


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
) -> tuple[np.ndarray, int]:
    """Return the score of each document ``(n,)``, and how many tokens were read, as far as that is known.

    ``most`` is how many tokens of each document count; ``param`` is the field with the documents.
    """
    lm = service.lm
    try:
        check_relevance(query, documents, None, by)
    except Exception as error:
        raise api_error(error, "query" if "query" in str(error) else param) from error
    async with service.claim(request) as claim:
        if most is not None:
            whole, most_each = documents, most
            try:
                for index, text in enumerate(whole):
                    check_unicode("text", text, index)
                documents = await claim.run(lambda: beginnings(lm.tokenizer, whole, most_each))
            except Exception as error:
                raise api_error(error, param) from error
        if by in (None, "vectors"):
            return await cosines(service, claim, query, documents, param=param, truncate=truncate)
        tokens = await claim.run(lambda: _count(service, [query, *documents]))
        try:
            work = claim.hold(
                service.engine.call(lambda: lm.rerank(query, documents, by=by), tokens=tokens, deadline=claim.deadline)
            )
            found = await claim.result(work)
        except Exception as error:
            raise api_error(error, "by") from error
    scores_N = np.empty(len(documents))
    scores_N[found.indices] = found.scores
    return scores_N, tokens


@router.post("/v1/score")
async def score(body: ScoreRequest, request: Request, service: Served) -> dict[str, Any]:
    """Say how well texts follow a prefix, by a scorer; or how alike two texts are, by their vectors."""
    service.demand_model(body.model)
    if (body.prefix is None) == (body.text_1 is None):
        raise ApiError("give either prefix with continuations, or text_1 with text_2", param="prefix")
    if body.prefix is not None:
        values, tokens = await _continuations(service, request, body)
    else:
        values, tokens = await _pairs(service, request, body)
    return {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "model": service.names[0],
        "data": [{"index": index, "object": "score", "score": value} for index, value in enumerate(values)],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }


async def _continuations(service: Service, request: Request, body: ScoreRequest) -> tuple[list[float], int]:
    lm, prefix, texts = service.lm, body.prefix or "", body.continuations
    if texts is None:
        raise ApiError("continuations: give the texts that are scored behind the prefix", param="continuations")
    async with service.claim(request) as claim:
        try:
            tokens = await claim.run(lambda: _count(service, [prefix, *texts]))
            work = claim.hold(
                service.engine.call(
                    lambda: lm.score([prefix], [texts], scorer=body.scorer), tokens=tokens, deadline=claim.deadline
                )
            )
            [found] = await claim.result(work)
        except Exception as error:
            raise api_error(error, blamed(error, body.model_fields_set) or "continuations") from error
    return [_finite(value) for value in found], tokens


async def _pairs(service: Service, request: Request, body: ScoreRequest) -> tuple[list[float], int]:
    if body.text_2 is None:
        raise ApiError("text_2: give the text or texts that text_1 is compared with", param="text_2")
    places: dict[str, str] = {}
    sides: list[list[str]] = []
    for field, given in (("text_1", body.text_1), ("text_2", body.text_2)):
        listed = [given] if isinstance(given, str) else list(given or ())
        sides.append(listed)
        for number, text in enumerate(listed):
            places.setdefault(text, field if isinstance(given, str) else f"{field}.{number}")
    one, other = sides
    if len(one) == 1:
        one = one * len(other)
    if len(one) != len(other):
        raise ApiError(f"text_1 has {len(one)} texts and text_2 {len(other)}; give as many, or one", param="text_2")
    unique = list(places)
    async with service.claim(request) as claim:
        found = await encoded(service, claim, unique, param="text_1", truncate=True, places=list(places.values()))
    row = {text: number for number, text in enumerate(unique)}
    vectors = unit(found.vectors)
    values = [float(vectors[row[left]] @ vectors[row[right]]) for left, right in zip(one, other, strict=True)]
    return values, sum(found.token_counts)


def _count(service: Service, texts: Sequence[str]) -> int:
    for index, text in enumerate(texts):
        check_unicode("text", text, index)
    return sum(len(one.ids) for one in encode_texts(service.lm.tokenizer, list(texts)))


def _finite(value: float) -> float:
    """Return a score as JSON can have it."""
    return max(-1e9, min(1e9, float(value)))


@router.post("/v1/search")
async def search(body: SearchRequest, request: Request, service: Served) -> dict[str, Any]:
    """Find the chunks of the index that is served which fit a query best."""
    service.demand_model(body.model)
    if not service.has_index:
        raise ApiError(
            "no index is served; make one with gerund index FOLDER -o my.index, and start with --index my.index",
            404,
            code="no_index",
        )
    how = {"mode": body.mode or "hybrid", "filter": body.filter, "weight": body.weight}
    async with service.claim(request) as claim:
        try:
            work = claim.hold(
                service.engine.call(
                    lambda: service.search(body.query, body.k or 10, **how),
                    tokens=len(body.query) // 4 + 1,
                    deadline=claim.deadline,
                )
            )
            hits = await claim.result(work)
        except Exception as error:
            blamed = next((field for field in ("filter", "weight") if field in str(error)), "query")
            raise api_error(error, blamed) from error
    return {
        "object": "list",
        "model": service.names[0],
        "index": service.index_name,
        "data": [{"object": "search_result", **hit.to_dict()} for hit in hits],
    }


# A map has a number for each pair of tokens.
_TOKENS = 64
_DIGITS = 4
_OF_PLAN = ("k", "k0", "sink_tokens", "skips")


@router.post("/v1/attention")
async def attention(body: AttentionRequest, request: Request, service: Served) -> dict[str, Any]:
    """Return where each layer looks in a text, averaged over heads, untouched and under a plan.

    A row is a token that looks, a column one that is looked at; rows add up to one.
    """
    service.demand_model(body.model)
    lm = service.lm
    if isinstance(lm, Seq2SeqModel):
        raise ApiError("no attention plan applies to a model with an encoder of its own", code="not_with_this_model")
    async with service.claim(request) as claim:
        try:
            read = await claim.run(lambda: _read_as(lm, body))
            work = claim.hold(
                service.engine.call(
                    lambda: inspect_attention(read.runtime, [body.text], longest=_TOKENS),
                    tokens=2 * _TOKENS,
                    deadline=claim.deadline,
                )
            )
            found = await claim.result(work)
        except Exception as error:
            raise api_error(error, "text" if "token" in str(error) else "plan") from error
    return _attention_answer(service, read, found)


def _read_as(lm: LanguageModel, body: AttentionRequest) -> LanguageModel:
    given = {name: value for name in _OF_PLAN if (value := getattr(body, name)) is not None}
    if body.plan is None:
        if given:
            name = next(iter(given))
            raise ApiError(f"{name} is a setting of a plan; name the plan", param=name)
        return lm
    plan = AttentionPlan(body.plan, **given)
    return lm.with_encoder(replace(lm.encoder, attention=plan))


def _attention_answer(service: Service, read: LanguageModel, found: AttentionInspection) -> dict[str, Any]:
    plan = read.encoder.attention.with_defaults(read.n_layers)
    sinks = zip(found.after, sink_fraction(found.after), strict=True)
    after: dict[int, list[tuple[Any, float]]] = {}
    for one, sink in sinks:
        after.setdefault(one.layer, []).append((one.weights, sink))
    layers = [
        {
            "before": _rows(one.weights),
            "after": [_rows(weights) for weights, _ in after[one.layer]],
            "sink_before": round(sink, _DIGITS),
            "sink_after": round(sum(own for _, own in after[one.layer]) / len(after[one.layer]), _DIGITS),
        }
        for one, sink in zip(found.before, sink_fraction(found.before), strict=True)
    ]
    return {
        "object": "attention",
        "model": service.names[0],
        "plan": ", ".join([plan.name, *(f"{name}={value}" for name, value in _settings(plan).items())]),
        "tokens": token_labels(read.tokenizer, found.ids[0]),
        "cut": bool(found.cut),
        "layers": layers,
    }


def _settings(plan: AttentionPlan) -> dict[str, int]:
    """Return what is to be said of a plan beside its name."""
    usual = AttentionPlan(plan.name)
    found = {name: getattr(plan, name) for name in _OF_PLAN if getattr(plan, name) is not None}
    return {name: value for name, value in found.items() if name == "k" or value != getattr(usual, name)}


def _rows(weights_TT: Any) -> list[list[float]]:
    return [[round(value, _DIGITS) for value in row] for row in weights_TT.tolist()]
