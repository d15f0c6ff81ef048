"""Models, health, metrics and the page for browsers."""

from importlib import resources
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from gerund.scoring.names import DEFAULT, MEASURE_NAMES, MODEL, RELEVANCE_MEASURES
from gerund.seq2seq_model import Seq2SeqModel
from gerund.server.errors import ApiError, unknown_model
from gerund.server.service import Served
from gerund.settings.plan import PLAN_NAMES
from gerund.text_analysis import stop_words

router = APIRouter()


@router.get("/v1/models", tags=["state"])
async def models(service: Served) -> dict[str, Any]:
    """List the model that is served."""
    service.demand_ready()
    return {"object": "list", "data": [service.card()]}


@router.get("/v1/models/{name:path}", tags=["state"])
async def model(name: str, service: Served) -> dict[str, Any]:
    """Describe the model that is served."""
    service.demand_ready()
    if name not in service.names:
        raise unknown_model(name, service.names[0])
    return service.card()


@router.get("/health", tags=["state"])
async def health(service: Served) -> JSONResponse:
    """Say whether requests are answered, and what the engine promises."""
    return JSONResponse(service.health(), 200 if service.phase == "ready" else 503)


@router.get("/metrics", tags=["state"], response_class=PlainTextResponse)
async def metrics(service: Served) -> PlainTextResponse:
    """Return what is counted, as Prometheus reads it."""
    service.observe()
    return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
# The page loads its own files and asks its own server; nothing else, and nobody frames it.
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


@router.get("/", response_class=Response, include_in_schema=False)
async def page() -> Response:
    """Return the page."""
    return _file("index.html")


@router.get("/page/{name}", response_class=Response, include_in_schema=False)
async def part(name: str) -> Response:
    """Return one of the page's files."""
    return _file(name)


def _file(name: str) -> Response:
    files = {one.name: one for one in (resources.files("gerund.server") / "page").iterdir()}
    kind = _TYPES.get(name.rpartition(".")[2])
    if kind is None or name not in files:
        raise ApiError("there is no such file", 404, code="not_found")
    return Response(files[name].read_bytes(), media_type=kind, headers=_HEADERS)


@router.get("/v1/playground", tags=["page"])
async def about(service: Served) -> dict[str, Any]:
    """Say what the page can offer: plans, scorers, whether there are chats and an index."""
    service.demand_ready()
    lm = service.lm
    is_decoder = not isinstance(lm, Seq2SeqModel)
    plan = lm.encoder.attention.with_defaults(lm.n_layers).name if is_decoder else ""
    own = [MODEL] if lm.scorer is not None else []
    return {
        "model": service.names[0],
        "dimensions": lm.dimensions,
        "context": service.limit,
        "chat": service.chats,
        "index": service.has_index,
        "stop_words": sorted(stop_words("en" if service.index is None else service.index.chunking.language)),
        "plan": plan,
        "plans": list(PLAN_NAMES) if is_decoder else [],
        "scorers": [*own, DEFAULT, *(one for one in MEASURE_NAMES if one != DEFAULT)],
        "measures": [one for one in RELEVANCE_MEASURES if one != MODEL or own],
    }
