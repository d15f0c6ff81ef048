"""``/infill``: gaps of a text, one or several, filled from both sides.

Knows: the route. Does not know: how gaps are filled.
"""

from typing import Any

from fastapi import APIRouter, Request

from gerund.server import infilling
from gerund.server.routes.common import Served
from gerund.server.schemas.writing import InfillRequest

router = APIRouter(tags=["writing"])


@router.post("/infill")
async def infill(body: InfillRequest, request: Request, service: Served) -> dict[str, Any]:
    """Fill the gaps of a text, seeing both sides of them."""
    service.demand_model(body.model)
    return await infilling.fill(service, request, body)
