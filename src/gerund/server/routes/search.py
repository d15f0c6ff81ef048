"""``/v1/search``: the chunks of the index that is served which fit a query best.

Knows: the fields and the answer. Does not know: how an index finds.
"""

from typing import Any

from fastapi import APIRouter, Request

from gerund.server.errors import ApiError, api_error
from gerund.server.routes.common import Served
from gerund.server.schemas.representation import SearchRequest

router = APIRouter(tags=["representation"])


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
