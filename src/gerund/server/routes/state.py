"""``/v1/models``, ``/health`` and ``/metrics``: what is served, and how it is doing.

Knows: the forms of OpenAI and Prometheus. Does not know: what is counted.
"""

from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, PlainTextResponse

from gerund.server.errors import unknown_model
from gerund.server.routes.common import Served

router = APIRouter(tags=["state"])


@router.get("/v1/models")
async def models(service: Served) -> dict[str, Any]:
    """List the model that is served."""
    service.demand_ready()
    return {"object": "list", "data": [service.card()]}


@router.get("/v1/models/{name:path}")
async def model(name: str, service: Served) -> dict[str, Any]:
    """Describe the model that is served."""
    service.demand_ready()
    if name not in service.names:
        raise unknown_model(name, service.names[0])
    return service.card()


@router.get("/health")
async def health(service: Served) -> JSONResponse:
    """Say whether requests are answered, and what the engine promises."""
    return JSONResponse(service.health(), 200 if service.phase == "ready" else 503)


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(service: Served) -> PlainTextResponse:
    """Return what is counted, as Prometheus reads it."""
    service.observe()
    return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
