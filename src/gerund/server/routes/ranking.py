"""Rerank in the forms of Cohere, Jina and text-embeddings-inference, and ``/v1/score``.

Knows: the fields and the answers. Does not know: how relevance is measured.
"""

import uuid
from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request

from gerund.inference.text_ids import beginnings, encode_texts
from gerund.inference.tokens import check_unicode
from gerund.models.pooling import unit
from gerund.scoring.relevance_measures import check_relevance
from gerund.server.encoding import cosines, encoded
from gerund.server.errors import ApiError, api_error, blamed
from gerund.server.routes.common import Served
from gerund.server.schemas.representation import AnyRerankRequest, RerankRequest, ScoreRequest
from gerund.server.service import Service

router = APIRouter(tags=["representation"])


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
