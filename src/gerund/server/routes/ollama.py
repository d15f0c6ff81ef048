"""Ollama's routes: chat, generate, embeddings, and descriptions of the model."""

import time
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from gerund.errors import GerundError
from gerund.gguf_file import parts_of, read_file
from gerund.inference.generate.prompts import has_tools_in_template
from gerund.models.kinds import is_encoder_decoder
from gerund.models.sources import find_spec
from gerund.server.answer_work import AnswerWork, answer_work
from gerund.server.errors import ERRORS
from gerund.server.generation_work import GenerationWork, chat_work, text_work
from gerund.server.ollama_format import OllamaForm, moment
from gerund.server.routes.embeddings import encode_inputs
from gerund.server.routes.generation import complete_before_suffix
from gerund.server.schemas.base import RequestBody
from gerund.server.schemas.generation import refuse_first
from gerund.server.schemas.ollama import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    ShowRequest,
)
from gerund.server.service import Served, Service
from gerund.types import Generation

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
