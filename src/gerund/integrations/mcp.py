"""An index as a server of the Model Context Protocol: tools to search, ask, read and add, and documents as resources.

Knows: the protocol's SDK, and what an index offers. Does not know: where the model runs (the host says), ports, keys.
"""

import signal
import sys
import traceback
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Annotated, Any, Protocol, TypeVar
from urllib.parse import quote, unquote

import anyio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gerund.errors import ConfigError, GerundError, MissingDependencyError
from gerund.retrieval.documents import PATH_SIGN, Document
from gerund.retrieval.index import Index
from gerund.retrieval.question_answering import ANSWER_HITS
from gerund.types import Answer, Hit, Source
from gerund.version import __version__

if find_spec("mcp") is None:
    raise MissingDependencyError("the Model Context Protocol needs mcp: pip install 'gerund[mcp]'")

import mcp_types as types
from mcp import MCPError
from mcp.server import Server
from mcp.server.stdio import stdio_server

T = TypeVar("T")

URI = "gerund://documents/"
"""Begins the URI of a document; its name follows, percent-encoded."""

# Characters of a document in one answer, and documents in one list.
_MOST_CHARACTERS = 20_000
_PAGE = 200
_DEFECT = "this failed by a defect of gerund, whatever was asked"

Name = Annotated[str, Field(min_length=1, max_length=1000)]


class Host(Protocol):
    """Where an index's work runs."""

    async def call(self, work: Callable[[Index], T], *, tokens: int) -> T:
        """Run work on the index, of about so many tokens, and return its result."""

    async def ask(self, question: str, k: int) -> Answer:
        """Answer a question."""

    def note_defect(self, error: BaseException) -> None:
        """Log an unexpected error."""


class LocalHost:
    """Runs the work in a thread of this process, one piece at a time; the index loads its model on first use."""

    def __init__(self, index: Index) -> None:
        self._index, self._lock = index, anyio.Lock()

    async def call(self, work: Callable[[Index], T], *, tokens: int) -> T:
        """Run work on the index and return its result."""
        del tokens
        async with self._lock:
            return await anyio.to_thread.run_sync(work, self._index)

    async def ask(self, question: str, k: int) -> Answer:
        """Answer a question; canceling it stops the model."""
        async with self._lock:
            return await self._index.aask(question, k)

    def note_defect(self, error: BaseException) -> None:
        """Print an unexpected error to standard error, where clients look for it."""
        traceback.print_exception(error, file=sys.stderr)


class _Arguments(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)


class _Search(_Arguments):
    query: Name
    """What to look for. Text in double quotes must occur unchanged."""
    k: Annotated[int, Field(ge=1, le=100)] = ANSWER_HITS
    """Most passages to return."""
    filter: Annotated[str, Field(max_length=1000)] | None = None
    """A condition in SQL on source, title, heading and text, such as source LIKE 'manual/%'."""


class _Ask(_Arguments):
    question: Name
    """A question, complete in itself."""
    k: Annotated[int, Field(ge=1, le=100)] = ANSWER_HITS
    """Most passages to base the answer on."""


class _Read(_Arguments):
    source: Name
    """Name of the document, as search and ask return it."""
    start: Annotated[int, Field(ge=0)] = 0
    """First character."""
    end: Annotated[int, Field(ge=0)] | None = None
    """The character after the last; default: as far as one answer goes."""


class _Add(_Arguments):
    source: Name
    """Name of the document; an added document of this name is replaced."""
    text: Annotated[str, Field(min_length=1, max_length=1_000_000)]
    """Its full text."""
    title: Annotated[str, Field(max_length=1000)] = ""
    """Its title."""


async def _search(host: Host, asked: _Search) -> types.CallToolResult:
    hits: list[Hit] = await host.call(
        lambda index: index.search(query=asked.query, k=asked.k, filter=asked.filter), tokens=_tokens(asked.query)
    )
    lines = [_quotation(hit.rank, hit) for hit in hits] or ["Nothing was found."]
    return _result("\n\n".join(lines), {"results": [hit.to_dict() for hit in hits]})


async def _ask(host: Host, asked: _Ask) -> types.CallToolResult:
    answer = await host.ask(asked.question, asked.k)
    cited = [source for source in answer.sources if source.number in answer.cited]
    structured = {
        "answer": answer.text,
        "found": answer.found,
        "method": answer.method,
        "sources": [source.to_dict() for source in cited],
        "checks": [check.to_dict() for check in answer.checks],
    }
    return _result("\n\n".join([answer.text, *(_quotation(source.number, source) for source in cited)]), structured)


async def _read(host: Host, asked: _Read) -> types.CallToolResult:
    document = await _document(host, asked.source)
    length = len(document.text)
    end = min(length, asked.start + _MOST_CHARACTERS, length if asked.end is None else asked.end)
    if asked.start >= end:
        raise ConfigError(
            f"{asked.source} has {length} characters; start={asked.start} and end={end} name no part of it"
        )
    text = document.text[asked.start : end]
    about = {"source": asked.source, "title": document.title, "start": asked.start, "end": end, "length": length}
    more = "" if end == length else f"\n\n[characters {asked.start} to {end} of {length}]"
    return _result(f"{text}{more}", {**about, "text": text})


async def _add(host: Host, asked: _Add) -> types.CallToolResult:
    summary = await host.call(partial(_added, asked), tokens=_tokens(asked.text))
    return _result(
        f"{asked.source} is stored, in {summary['chunks']} passages." if summary["documents"]
        else f"{asked.source} is stored already.",
        {"source": asked.source, **summary},
    )  # fmt: skip


def _added(asked: _Add, index: Index) -> dict[str, int]:
    known = index.document(asked.source)
    if known is not None and known.file:
        raise ConfigError(f"{asked.source} comes from a file, which gerund index reads; choose another name")
    summary = index.add_documents([Document(asked.source, asked.text, asked.title)])
    return {"documents": summary.documents, "chunks": summary.chunks}


async def _document(host: Host, source: str) -> Document:
    """Return a document of the index; nothing else can be read, whatever its name."""
    document = await host.call(lambda index: index.document(source), tokens=1)
    if document is None:
        raise ConfigError(f"the index has no document {source!r}; search names its documents")
    return document


def _tokens(text: str) -> int:
    """Return about how many tokens a text has."""
    return len(text) // 4 + 1


def _quotation(number: int, quoted: Hit | Source) -> str:
    # The first heading is often the title.
    has_title = quoted.title in (quoted.heading, quoted.heading.split(PATH_SIGN)[0])
    about = " - ".join(part for part in ("" if has_title else quoted.title, quoted.heading) if part)
    head = f"[{number}] {quoted.source}, characters {quoted.start} to {quoted.end}"
    return f"{head}{f' ({about})' if about else ''}:\n{quoted.text}"


def _result(text: str, structured: Mapping[str, Any]) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)], structured_content=dict(structured))


@dataclass(frozen=True)
class _Tool:
    arguments: type[_Arguments]
    run: Callable[[Host, Any], Awaitable[types.CallToolResult]]
    description: str
    writes: bool = False


_TOOLS = {
    "search": _Tool(
        _Search,
        _search,
        "Find the passages of the documents that match a query best, by words and by meaning. Each is an exact "
        "quotation with its document and its characters in it.",
    ),
    "ask": _Tool(
        _Ask,
        _ask,
        "Answer a question from the documents, with the passages that the answer is based on. Says so where the "
        "documents have no answer.",
    ),
    "read": _Tool(
        _Read, _read, f"Read a document, or a part of it: at most {_MOST_CHARACTERS} characters at a time."
    ),
    "add": _Tool(_Add, _add, "Store a text as a document, so that it can be found.", writes=True),
}  # fmt: skip


@cache
def _described(name: str) -> types.Tool:
    tool = _TOOLS[name]
    hints = types.ToolAnnotations(read_only_hint=not tool.writes, open_world_hint=False)
    schema = {**tool.arguments.model_json_schema(), "title": name}
    return types.Tool(name=name, description=tool.description, input_schema=schema, annotations=hints)


def make_server(host: Host, name: str, *, allow_add: bool = False) -> "Server[Any]":
    """Return a server that offers an index, for any transport of the SDK.

    Args:
        host: runs the work.
        name: what clients call the index.
        allow_add: whether there is the tool ``add``.
    """
    offered = [tool for tool in _TOOLS if allow_add or not _TOOLS[tool].writes]

    async def list_tools(*_: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool) for tool in offered])

    async def call_tool(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        if params.name not in offered:
            hint = "; it is off unless the server is started with --allow-add" if params.name in _TOOLS else ""
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {params.name!r}{hint}")
        return await _called(host, _TOOLS[params.name], params.arguments or {})

    async def list_resources(_: Any, params: types.PaginatedRequestParams | None) -> types.ListResourcesResult:
        return await _listed(host, None if params is None else params.cursor)

    async def read_resource(_: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
        return await _resource(host, str(params.uri))

    async def list_templates(*_: Any) -> types.ListResourceTemplatesResult:
        template = types.ResourceTemplate(name="document", uri_template=f"{URI}{{source}}", mime_type="text/plain")
        return types.ListResourceTemplatesResult(resource_templates=[template])

    return Server(
        "gerund",
        version=__version__,
        title=f"Documents in {name}",
        instructions=f"The documents of {name}: search or ask, then quote exactly and name the source.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_resources=list_resources,
        on_read_resource=read_resource,
        on_list_resource_templates=list_templates,
    )


async def _called(host: Host, tool: _Tool, given: Mapping[str, Any]) -> types.CallToolResult:
    """Return a tool's result; what is wrong with a call is told to the model, which can mend it."""
    try:
        return await tool.run(host, tool.arguments.model_validate(given))
    except ValidationError as error:
        first = error.errors()[0]
        message = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    except GerundError as error:
        message = str(error)
    except Exception as error:
        host.note_defect(error)
        message = _DEFECT
    return types.CallToolResult(content=[types.TextContent(text=message)], is_error=True)


async def _listed(host: Host, cursor: str | None) -> types.ListResourcesResult:
    """Return a page of documents, by name; the cursor is the last name of the page before."""
    sources = await _protected(host, host.call(lambda index: index.sources(), tokens=1))
    rest = [source for source in sources if cursor is None or source > cursor]
    page = [types.Resource(name=source, uri=URI + quote(source, safe=""), mime_type="text/plain")
            for source in rest[:_PAGE]]  # fmt: skip
    return types.ListResourcesResult(resources=page, next_cursor=page[-1].name if len(rest) > _PAGE else None)


async def _resource(host: Host, uri: str) -> types.ReadResourceResult:
    source = unquote(uri.removeprefix(URI))
    if not uri.startswith(URI) or not source:
        raise MCPError(types.INVALID_PARAMS, f"a document's URI begins with {URI}, not {uri[:100]!r}", {"uri": uri})
    document = await _protected(host, _document(host, source), uri)
    contents = types.TextResourceContents(uri=uri, text=document.text, mime_type="text/plain")
    return types.ReadResourceResult(contents=[contents])


async def _protected(host: Host, work: Awaitable[T], uri: str | None = None) -> T:
    """Turn errors of the library into those of the protocol."""
    data = None if uri is None else {"uri": uri}
    try:
        return await work
    except GerundError as error:
        raise MCPError(types.INVALID_PARAMS, str(error), data) from error
    except Exception as error:
        host.note_defect(error)
        raise MCPError(types.INTERNAL_ERROR, _DEFECT, data) from error


def serve_stdio(index: Index, name: str, *, allow_add: bool = False) -> None:
    """Offer an index on standard input and output until the client closes them; on a terminal Ctrl-C ends it."""
    if sys.stdin.isatty():
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the SDK's thread waits for a line, which no exception ends

    async def run() -> None:
        server = make_server(LocalHost(index), name, allow_add=allow_add)
        async with stdio_server() as (received, sent):
            await server.run(received, sent, server.create_initialization_options())

    anyio.run(run)
