"""``/v1/embeddings``: texts as vectors, in numbers or base64, with the fingerprint of the encoder that made them.

Knows: OpenAI's fields. Does not know: how texts become vectors.
"""

import base64
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Header, Request, Response

from gerund.checks import check_dimensions
from gerund.errors import FingerprintError
from gerund.server.encoding import encoded
from gerund.server.errors import api_error
from gerund.server.routes.common import FINGERPRINT_HEADER, MISMATCH, Served
from gerund.server.schemas.representation import EmbeddingRequest

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
            prompt_name=body.prompt_name,
            dimensions=body.dimensions,
            truncate=bool(body.truncate),
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


def _checked(dimensions: int | None, most: int) -> int | None:
    """Return how many numbers are kept, after checking it: a fingerprint is made for any number."""
    check_dimensions(dimensions, most)
    return None if dimensions == most else dimensions


def _shown(vector_D: np.ndarray, form: str | None) -> str | list[float]:
    if form == "base64":
        return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
    listed: list[float] = vector_D.astype(np.float32).tolist()
    return listed
