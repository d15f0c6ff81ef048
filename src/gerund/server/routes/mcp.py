"""The index as a server of the Model Context Protocol (streamable HTTP), without sessions: any worker may answer."""

from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import TypeVar

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gerund.errors import ResourceError
from gerund.integrations.mcp import make_server
from gerund.retrieval.index import Index
from gerund.retrieval.question_answering import Question
from gerund.server.app import replayed
from gerund.server.errors import ApiError, ClientGoneError
from gerund.server.logs import note_defect
from gerund.server.service import RequestContext, Service
from gerund.types import Answer

T = TypeVar("T")
PATH = "/mcp"


def route(service: Service) -> Route:
    """Return the route for a service that has an index."""
    return Route(PATH, endpoint=_Endpoint(service), methods=["POST"], include_in_schema=False)


class _Endpoint:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        scope["route"] = route(self._service)  # for the log
        service, settings = self._service, self._service.settings
        service.require_ready()
        body = await Request(scope, receive).body()
        async with service.context(Request(scope, receive)) as context:
            host = _EngineHost(service, context)
            server = make_server(host, PurePath(str(settings.index)).name, allow_add=settings.allow_add)
            manager = StreamableHTTPSessionManager(
                server, json_response=True, stateless=True, max_request_body_size=settings.body_limit
            )
            async with manager.run():
                await manager.handle_request(scope, replayed(body, receive), send)


class _EngineHost:
    """Runs the work of one request in the engine, within the server's limits."""

    def __init__(self, service: Service, context: RequestContext) -> None:
        self._service, self._context = service, context

    async def call(self, work: Callable[[Index], T], *, tokens: int) -> T:
        """Run work on the index and return its result."""
        try:
            return await self._context.call(partial(self._service.with_index, work), tokens=tokens)
        except ApiError as error:
            raise _told(error) from error

    async def ask(self, question: str, k: int) -> Answer:
        """Answer a question; the model generates between other requests."""
        try:
            return await self._context.ask(Question.of(question, k, {}))
        except ApiError as error:
            raise _told(error) from error

    def note_defect(self, error: BaseException) -> None:
        """Log an unexpected error."""
        note_defect(error)


def _told(error: ApiError) -> Exception:
    """Return what a model is told of the server's own errors."""
    return error if isinstance(error, ClientGoneError) else ResourceError(error.message)
