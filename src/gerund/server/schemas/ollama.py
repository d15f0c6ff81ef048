"""Bodies of Ollama's routes, and how they become chats, completions and texts to encode."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from gerund.server.errors import ApiError
from gerund.server.schemas.base import ANY, MOST_TEXTS, Accepted, Body, Count, RequestBody, Text
from gerund.server.schemas.generation import ChatRequest, CompletionRequest, refuse_first, translated
from gerund.server.schemas.tools import CalledFunction, Tools, plain

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
        **dict.fromkeys(("mirostat",), (0,)),
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


class OllamaCall(Body):
    """An earlier call of the model."""

    without_effect: ClassVar[Accepted | None] = {"id": ANY, "type": ANY}
    function: "OllamaFunction"


class OllamaFunction(CalledFunction):
    """The name and arguments of a call."""

    without_effect: ClassVar[Accepted | None] = {"index": ANY}


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


OllamaCall.model_rebuild()
