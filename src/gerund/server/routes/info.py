"""Routes for model information, health, metrics and the browser page."""

from importlib import resources
from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from gerund.models.kinds import is_encoder_decoder
from gerund.scoring.names import DEFAULT, MIXED, MODEL, SCORER_NAMES
from gerund.server.errors import ApiError, unknown_model
from gerund.server.service import Served
from gerund.settings.plan import PLAN_NAMES
from gerund.settings.ranking import RELEVANCE_MEASURES
from gerund.text_analysis import stop_words

router = APIRouter()


@router.get("/v1/models", tags=["state"])
async def models(service: Served) -> dict[str, Any]:
    """List the model that is served, twice with an index: the second name answers from it."""
    service.require_ready()
    return {"object": "list", "data": service.cards()}


@router.get("/v1/models/{name:path}", tags=["state"])
async def model(name: str, service: Served) -> dict[str, Any]:
    """Describe the model that is served."""
    service.require_ready()
    if service.asks_index(name):
        return {**service.card(), "id": name}
    if name not in service.names:
        raise unknown_model(name, *service.listed_names)
    return service.card()


@router.get("/health", tags=["state"])
async def health(service: Served) -> JSONResponse:
    """Return whether requests are answered, and what the engine guarantees."""
    return JSONResponse(service.health(), 200 if service.phase == "ready" else 503)


@router.get("/metrics", tags=["state"], response_class=PlainTextResponse)
async def metrics(service: Served) -> PlainTextResponse:
    """Return the metrics in Prometheus' format."""
    service.observe()
    return PlainTextResponse(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
# The page may load its own files and call its own server, nothing else, and no site may frame it.
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
    files = {file.name: file for file in (resources.files("gerund.server") / "page").iterdir()}
    kind = _TYPES.get(name.rpartition(".")[2])
    if kind is None or name not in files:
        raise ApiError("there is no such file", 404, code="not_found")
    return Response(files[name].read_bytes(), media_type=kind, headers=_HEADERS)


@router.get("/v1/playground", tags=["page"])
async def about(service: Served) -> dict[str, Any]:
    """Return what the page can offer: plans, scorers, whether there are chats and an index."""
    service.require_ready()
    lm = service.lm
    is_decoder = not is_encoder_decoder(lm.model)
    plan = lm.encoder.with_defaults(lm.n_layers).attention.name if is_decoder else ""
    trained = [MODEL, MIXED] if lm.has_scorer else []
    return {
        "model": service.names[0],
        "dimensions": service.encoder.dimensions,
        "context": service.limit,
        "chat": service.chats,
        "index": service.index is not None,
        "stop_words": sorted(stop_words("en" if service.index is None else service.index.chunking.language)),
        "plan": plan,
        "plans": list(PLAN_NAMES) if is_decoder else [],
        "scorers": [*trained, DEFAULT, *(name for name in SCORER_NAMES if name not in (DEFAULT, MIXED))],
        "measures": [name for name in RELEVANCE_MEASURES if name != MODEL or trained],
    }
