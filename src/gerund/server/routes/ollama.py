"""Ollama's API: chat, generate, embeddings, and descriptions of the model.

Bodies become chats, completions and texts to encode; an answer is one JSON object, or a line of JSON per piece of text.
"""

import json
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from pydantic import Field

from gerund.errors import GerundError
from gerund.gguf_file import parts_of, read_file
from gerund.inference.generate.prompts import has_tools_in_template
from gerund.inference.generate.tool_reading import Event
from gerund.models.kinds import is_encoder_decoder
from gerund.models.sources import find_spec
from gerund.server.bodies import ANY, MOST_TEXTS, Accepted, Body, Count, RequestBody, Text
from gerund.server.errors import ERRORS, ApiError
from gerund.server.generation_bodies import (
    CalledFunction,
    ChatRequest,
    CompletionRequest,
    Tools,
    plain,
    refuse_first,
    translated,
)
from gerund.server.openai_format import AnswerForm, Wire
from gerund.server.routes.embeddings import encode_inputs
from gerund.server.routes.generation import complete_before_suffix
from gerund.server.service import Served, Service
from gerund.server.work import AnswerWork, GenerationWork, answer_work, chat_work, text_work
from gerund.types import Generation, TokenLogprob

# Ollama's defaults.
TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9

Think = bool | Literal["low", "medium", "high"]
Format = Literal["", "json"] | dict[str, Any]


class Options(Body):
    """Options of Ollama: those of sampling and length."""

    without_effect: ClassVar[Accepted | None] = {
        # Where and how fast it is computed; the context is the server's.
        **dict.fromkeys(("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "num_keep", "numa"), ANY),
        **dict.fromkeys(("low_vram", "use_mmap", "use_mlock", "vocab_only", "f16_kv", "logits_all"), ANY),
        # Samplers that are off, and the settings that only matter when they are on.
        "mirostat": (0,),
        **dict.fromkeys(("mirostat_tau", "mirostat_eta", "repeat_last_n", "penalize_newline"), ANY),
        "tfs_z": (1,),
        "embedding_only": (False,),
    }
    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    """Most tokens to generate; -1 and -2: as many as the server allows."""
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[list[Text], Field(max_length=16, fail_fast=True)] | None = None
    repeat_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None

    def fields(self, usual_temperature: float = TEMPERATURE) -> dict[str, Any]:
        """Return the options by OpenAI's names."""
        temperature = usual_temperature if self.temperature is None else self.temperature
        filters: dict[str, Any] = {}
        if temperature:
            filters = {
                "top_k": (TOP_K if self.top_k is None else self.top_k) or None,
                "top_p": (TOP_P if self.top_p is None else self.top_p) or None,
                "min_p": self.min_p,
                "typical_p": self.typical_p,
            }
        return {
            **filters,
            "temperature": temperature,
            "max_tokens": self.num_predict if (self.num_predict or 0) > 0 else None,
            "seed": self.seed,
            "stop": self.stop or None,
            "repetition_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }


class OllamaBody(RequestBody):
    """Fields of all routes that generate."""

    options: Options | None = None
    stream: bool | None = None
    format: Format | None = None
    think: Think | None = None
    logprobs: bool | None = None

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream, as it is by default."""
        return self.stream is not False

    def fields(self, usual_temperature: float = TEMPERATURE) -> dict[str, Any]:
        """Return what a chat and a completion have alike, by OpenAI's names."""
        refuse_first({"think": bool(self.think), "logprobs": bool(self.logprobs)})
        form: dict[str, Any] | None = {"type": "json_object"} if self.format == "json" else None
        if isinstance(self.format, dict):
            form = {"type": "json_schema", "json_schema": {"schema": self.format}}
        options = (self.options or Options()).fields(usual_temperature)
        return {"stream": self.streams, "response_format": form, **options}


class OllamaFunction(CalledFunction):
    """The name and arguments of a call."""

    without_effect: ClassVar[Accepted | None] = {"index": ANY}


class OllamaCall(Body):
    """An earlier call of the model."""

    without_effect: ClassVar[Accepted | None] = {"id": ANY, "type": ANY}
    function: OllamaFunction


class OllamaMessage(Body):
    """One turn of a conversation."""

    without_effect: ClassVar[Accepted | None] = {"thinking": ("",)}
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | None = None
    images: list[Any] | None = None
    tool_calls: Annotated[list[OllamaCall], Field(max_length=1024, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None


class OllamaChatRequest(OllamaBody):
    """A conversation to be answered."""

    messages: Annotated[list[OllamaMessage], Field(max_length=4096, fail_fast=True)] | None = None
    tools: Tools | None = None

    def chat(self, usual_temperature: float = TEMPERATURE) -> ChatRequest:
        """Return the request as a chat of OpenAI's API."""
        messages = []
        for number, message in enumerate(self.messages or []):
            refuse_first({f"messages.{number}.images": bool(message.images)})
            messages.append({
                "role": message.role,
                "content": message.content or "",
                "tool_calls": [
                    {"type": "function", "function": call["function"]} for call in plain(message.tool_calls) or ()
                ] or None,
                "name": message.tool_name,
                "tool_call_id": message.tool_call_id,
            })  # fmt: skip
        tools = plain(self.tools) or None
        return translated(ChatRequest, {**self.fields(usual_temperature), "messages": messages, "tools": tools})


class OllamaGenerateRequest(OllamaBody):
    """A prompt to be continued or, in the form of the model's chat template, answered."""

    without_effect: ClassVar[Accepted | None] = {"context": ([],), "template": ("",)}
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    @property
    def is_empty(self) -> bool:
        """Whether nothing is asked, but that the model be loaded."""
        return not self.prompt and not self.suffix

    def chat(self, usual_temperature: float = TEMPERATURE) -> ChatRequest:
        """Return the prompt as a chat of one message."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return translated(ChatRequest, {**self.fields(usual_temperature), "messages": messages})

    def completion(self) -> CompletionRequest:
        """Return the prompt as one to be continued."""
        refuse_first({"images": bool(self.images)})
        if self.system:
            raise ApiError("system needs a chat template; leave it, or raw and suffix, out", param="system")
        return translated(CompletionRequest, {**self.fields(), "prompt": self.prompt or "", "suffix": self.suffix})


class OllamaEmbedRequest(RequestBody):
    """Texts to encode."""

    input: Text | Annotated[list[Text], Field(max_length=MOST_TEXTS, fail_fast=True)]
    truncate: bool | None = None
    dimensions: Count | None = None
    options: Options | None = None

    @property
    def texts(self) -> list[str]:
        """The texts."""
        return [self.input] if isinstance(self.input, str) else self.input


class OllamaEmbeddingsRequest(RequestBody):
    """One text to encode, in the older form."""

    prompt: Text
    options: Options | None = None


class ShowRequest(RequestBody):
    """A model to describe."""

    without_effect: ClassVar[Accepted | None] = {"verbose": ANY, "system": ("",), "template": ("",), "options": ANY}
    name: Annotated[str, Field(max_length=200)] | None = None
    """The older name of ``model``."""


def moment(seconds: float | None = None) -> str:
    """Return a time as Ollama writes it; None for now."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


def line(content: Any) -> bytes:
    r"""Return one line of JSON.

    >>> line({"done": True})
    b'{"done": true}\n'
    """
    return f"{json.dumps(content, ensure_ascii=False)}\n".encode("utf-8", "replace")


NDJSON = Wire("application/x-ndjson", line, lambda error: {"error": error.message})


class OllamaForm(AnswerForm):
    """Ollama's form of chats and of ``generate``; the tool calls of an answer come together."""

    wire = NDJSON

    def __init__(self, kind: Literal["chat", "generate"], model: str) -> None:
        self._is_chat, self._model = kind == "chat", model
        self._began = time.perf_counter_ns()
        self._reason = "stop"

    def whole(self, completions: Sequence[Generation], usage: dict[str, Any]) -> dict[str, Any]:
        [completion] = completions
        calls, text = _calls(completion)
        self._reason = "stop" if completion.finished else "length"
        return {**self._with_details(self._piece(text, calls)), **self._end(usage)}

    def first(self, count: int) -> tuple[()]:
        del count
        return ()

    def parts(self, index: int, parts: Sequence[Event], logprobs: Sequence[TokenLogprob]) -> Iterator[dict[str, Any]]:
        del index, logprobs
        for part in parts:
            if isinstance(part, str):
                yield {**self._piece(part), "done": False}

    def last(self, index: int, completion: Generation) -> Iterator[dict[str, Any]]:
        del index
        calls, text = _calls(completion)
        self._reason = "stop" if completion.finished else "length"
        unread = text[len(completion.text) :]
        if calls or unread:
            yield {**self._piece(unread, calls), "done": False}

    def end(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**self._with_details(self._piece("")), **self._end(usage)}]

    def _with_details(self, piece: dict[str, Any]) -> dict[str, Any]:
        if self._is_chat:
            return {**piece, "message": {**piece["message"], **self.details}}
        return {**piece, **self.details}

    def _piece(self, text: str, calls: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        content: dict[str, Any] = {"response": text}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message["tool_calls"] = list(calls)
            content = {"message": message}
        return {"model": self._model, "created_at": moment(), **content}

    def _end(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": time.perf_counter_ns() - self._began,
            "load_duration": 0,  # the model was in memory
            "prompt_eval_count": usage["prompt_tokens"],
            "eval_count": usage["completion_tokens"],
            **self._durations(),
        }

    def _durations(self) -> dict[str, int]:
        """Return how long prompt and answer took, without the time in the queue; nothing where that isn't known."""
        times = self.times
        if times is None or times.began is None or times.first_token is None or times.ended is None:
            return {}
        return {
            "prompt_eval_duration": times.first_token - times.began,
            "eval_duration": times.ended - times.first_token,
        }


def _calls(completion: Generation) -> tuple[list[dict[str, Any]], str]:
    """Return the tool calls, whose arguments are objects in Ollama's form, and the text with those that are none."""
    text, calls = completion.text, []
    for call in completion.tool_calls:
        if call.is_valid:
            calls.append({"function": {"name": call.name, "arguments": json.loads(call.arguments)}})
        else:
            text += f'{{"name": {json.dumps(call.name)}, "arguments": {call.arguments}'
    return calls, text


# The version of Ollama whose routes these are; some clients want a certain one.
OLLAMA_VERSION = "0.9.0"

_ERROR = {"application/json": {"schema": {"type": "object", "properties": {"error": {"type": "string"}}}}}
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"description": error["description"], "content": _ERROR} for status, error in ERRORS.items()
}
_STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer, as lines of JSON; with stream: false, one object.",
        "content": {"application/json": {}, "application/x-ndjson": {"schema": {"type": "string"}}},
    }
}

router = APIRouter(tags=["ollama"], prefix="/api", responses=_ERRORS)


@router.post("/chat", responses=_STREAMS, response_model=None)
async def chat(body: OllamaChatRequest, request: Request, service: Served) -> Any:
    """Generate the next message of a conversation; without messages, nothing is done."""
    name = _require_model(service, body, chats=True)
    form = OllamaForm("chat", name)
    if not body.messages:
        return {**form.whole([_NOTHING], _NO_USAGE), "done_reason": "load"}
    return await _chat_work(service, body).answer(request, form)


@router.post("/generate", responses=_STREAMS, response_model=None)
async def generate(body: OllamaGenerateRequest, request: Request, service: Served) -> Any:
    """Answer a prompt; continue it if it is ``raw`` or the model has no chat template; with ``suffix``, infill."""
    name = _require_model(service, body, chats=True)
    form = OllamaForm("generate", name)
    if body.is_empty:
        return {**form.whole([_NOTHING], _NO_USAGE), "done_reason": "load"}
    if _asks_index(service, body):
        refuse_first({"suffix": bool(body.suffix), "raw": bool(body.raw), "images": bool(body.images)})
        return await _chat_work(service, body).answer(request, form)
    if body.suffix:
        completion = body.completion()
        completion.refuse_with_suffix()
        return await complete_before_suffix(service, request, completion, body.prompt or "", form)
    if body.raw or not service.chats:
        return await text_work(service, body.completion(), service.settings.max_new_tokens, is_explicit=False).answer(
            request, form
        )
    refuse_first({"images": bool(body.images)})
    return await _chat_work(service, body).answer(request, form)


@router.post("/embed")
async def embed(body: OllamaEmbedRequest, request: Request, service: Served) -> dict[str, Any]:
    """Encode texts; those that are too long are truncated unless the request says otherwise."""
    name, began = _require_model(service, body), time.perf_counter_ns()
    if not body.texts:
        return {"model": name, "embeddings": [], "total_duration": 0, "load_duration": 0, "prompt_eval_count": 0}
    async with service.context(request) as context:
        result = await encode_inputs(
            *(service, context, body.texts),
            param="input",
            truncate=body.truncate is not False,
            dimensions=body.dimensions,
        )
    return {
        "model": name,
        "embeddings": result.vectors.tolist(),
        "total_duration": time.perf_counter_ns() - began,
        "load_duration": 0,
        "prompt_eval_count": sum(result.token_counts),
    }


@router.post("/embeddings")
async def embeddings(body: OllamaEmbeddingsRequest, request: Request, service: Served) -> dict[str, Any]:
    """Encode one text, truncated if it is too long."""
    _require_model(service, body)
    async with service.context(request) as context:
        result = await encode_inputs(service, context, [body.prompt], param="prompt", truncate=True)
    return {"embedding": result.vectors[0].tolist()}


@router.get("/tags")
async def tags(service: Served) -> dict[str, Any]:
    """List the model that is served."""
    service.require_ready()
    return {"models": [_entry(service, name) for name in service.listed_names]}


@router.get("/ps")
async def running(service: Served) -> dict[str, Any]:
    """List the model that is served, which is in memory as long as the server runs."""
    service.require_ready()
    memory = {"size_vram": 0, "context_length": service.limit or 0, "expires_at": "9999-12-31T23:59:59Z"}
    return {"models": [{**_entry(service), **memory}]}


@router.post("/show")
async def show(body: ShowRequest, service: Served) -> dict[str, Any]:
    """Describe the model that is served."""
    name = body.model or body.name
    if not service.asks_index((name or "").removesuffix(":latest")):
        _require_model(service, body, name)
    lm, config = service.lm, service.lm.model.config
    kind = str(config.model_type)
    template = lm.tokenizer.chat_template
    info = {
        "general.architecture": kind,
        "general.parameter_count": lm.n_parameters,
        f"{kind}.context_length": service.limit,
        f"{kind}.embedding_length": service.encoder.dimensions,
    }
    return {
        "modelfile": "",
        "parameters": "",
        "template": template if isinstance(template, str) else "",
        "details": _details(service),
        "model_info": info,
        "capabilities": _capabilities(service),
        "modified_at": moment(service.created),
    }


@router.get("/version")
async def version() -> JSONResponse:
    """Return the version of Ollama whose routes these are."""
    return JSONResponse({"version": OLLAMA_VERSION})


# The types of whole files, by llama.cpp's numbers (``general.file_type``).
_FILE_TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 32: "BF16",
}  # fmt: skip
_NOTHING = Generation("", [], 0.0, True)
_NO_USAGE = {"prompt_tokens": 0, "completion_tokens": 0}


def _require_model(service: Service, body: RequestBody, named: str | None = None, *, chats: bool = False) -> str:
    """Return the model's name as the client calls it; Ollama's names may end with a tag."""
    name = named or body.model
    service.require_ready()
    if name and name not in service.names and not (chats and _asks_index(service, body)):
        service.require_model(name.removesuffix(":latest"))
    return name or service.names[0]


def _asks_index(service: Service, body: RequestBody) -> bool:
    return service.asks_index((body.model or "").removesuffix(":latest"))


def _chat_work(service: Service, body: OllamaChatRequest | OllamaGenerateRequest) -> GenerationWork | AnswerWork:
    # Answers from the index are greedy, as on the other routes, unless the client asks for a temperature.
    return answer_work(service, body.chat(0.0)) if _asks_index(service, body) else chat_work(service, body.chat())


def _entry(service: Service, name: str | None = None) -> dict[str, Any]:
    name, file = name or service.names[0], _gguf_file(service)
    return {
        "name": name,
        "model": name,
        "modified_at": moment(service.created),
        "size": service.lm.model.get_memory_footprint()
        if file is None
        else sum(part.stat().st_size for part in parts_of(file)),
        "digest": service.lm.weights_hash,
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    model, file = service.lm.model, _gguf_file(service)
    kind = str(model.config.model_type)
    stored = str(model.dtype).removeprefix("torch.")
    if file is not None:
        stored = _FILE_TYPES.get(read_file(file).metadata.get("general.file_type", -1), "unknown")
    return {
        "parent_model": "",
        "format": "safetensors" if file is None else "gguf",
        "family": kind,
        "families": [kind],
        "parameter_size": f"{service.lm.n_parameters / 1e6:.0f}M",
        "quantization_level": stored,
    }


def _gguf_file(service: Service) -> Path | None:
    """Return the file of a model that was opened from one."""
    try:
        return find_spec(service.lm.spec).gguf
    except GerundError:  # it was made in memory, or its files are gone
        return None


def _capabilities(service: Service) -> list[str]:
    """Return what the model can do, by Ollama's names."""
    tokenizer = service.lm.tokenizer
    capabilities = ["completion", "embedding"]
    # Editors complete code before the cursor's suffix by it, which only a model that was trained to infill does well.
    if service.lm.fills_gaps and not is_encoder_decoder(service.lm.model):
        capabilities.append("insert")
    if service.chats and (service.settings.tool_prompt is not None or has_tools_in_template(tokenizer)):
        capabilities.append("tools")
    return capabilities
