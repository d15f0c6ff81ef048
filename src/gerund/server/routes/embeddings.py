"""``/v1/embeddings``: texts as vectors, in numbers or base64, with the fingerprint of the encoder that made them.

Knows: OpenAI's fields. Does not know: how texts become vectors.
"""

import base64
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Header, Request, Response

from gerund.checks import check_dimensions
from gerund.errors import FingerprintError
from gerund.server.encoding import encoded, prompt_for
from gerund.server.errors import ApiError, api_error
from gerund.server.routes.common import FINGERPRINT_HEADER, MISMATCH, Served
from gerund.server.schemas.representation import EmbeddingRequest
from gerund.server.service import Service

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
