"""Bodies of chats, completions and infilling, with their tools, and how they become ``GenerationConfig``."""

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, ValidationError

from gerund.inference.generate.config import GenerationConfig, GenerationKeywords
from gerund.inference.generate.prompts import TemplateOptions
from gerund.inference.generate.tools import MOST_TOOLS, NAME_PATTERN, ToolKeywords
from gerund.server.bodies import ANY, Accepted, Body, Count, Ids, ManyIds, RequestBody, Text, Texts, TokenId, worst
from gerund.server.errors import ApiError, unsupported
from gerund.settings.sampling import Sampling

MOST_CALLS = 1024

ToolName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]


class ToolFunction(Body):
    """A function that may be called."""

    # Where a call is required, its arguments match the schema in any case.
    without_effect: ClassVar[Accepted | None] = {"strict": ANY, "cache_control": ANY}
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool in OpenAI's form."""

    without_effect: ClassVar[Accepted | None] = {"cache_control": ANY}
    misplaced: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ToolFunction.model_fields, '"function", as in {"type": "function", "function": {"name": ...}}'
    )
    type: Literal["function"] = "function"
    function: ToolFunction


Tools = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]


class ChosenFunction(Body):
    """The name of a tool."""

    name: ToolName


class ChosenTool(Body):
    """The tool that has to be called."""

    type: Literal["function"] = "function"
    function: ChosenFunction


Choice = Literal["none", "auto", "required"]


class CalledFunction(Body):
    """The name and arguments of a call."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    arguments: str | dict[str, Any] | None = None


class MessageCall(Body):
    """An earlier call of the model, in its message."""

    without_effect: ClassVar[Accepted | None] = dict.fromkeys(
        ("index", "extra_content", "provider_specific_fields", "cache_control"), ANY
    )
    id: Annotated[str, Field(max_length=200)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


MessageCalls = Annotated[list[MessageCall], Field(max_length=MOST_CALLS, fail_fast=True)]


def plain(models: Sequence[Body] | None) -> list[dict[str, Any]] | None:
    """Return models as dicts, without what was omitted."""
    return None if models is None else [model.model_dump(exclude_none=True) for model in models]


MOST_CHOICES = 128
# Bad words, and stop tokens.
MOST_BANNED = 128
# OpenAI's default for completions.
USUAL_COMPLETION = 16
# Tokens per blank; all lengths up to the longest are tried.
MOST_FILLED = 512
ScorerName = Literal[
    "model",
    "own",
    "pmi",
    "avg_cll",
    "cll",
    "avg_ull",
    "self_certainty",
    "overlap",
    "content_overlap",
    "random",
    "consensus",
    "mixed",
]

Stop = Text | Annotated[list[Text], Field(max_length=16, fail_fast=True)]
BadWord = Annotated[str, Field(min_length=1, max_length=100)]
Choices = Annotated[int, Field(ge=1, le=MOST_CHOICES)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Above0 = Annotated[float, Field(gt=0, le=1)]


# Fields that `generate` has by the same names.
_LIMITS = (
    *("min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output", "bad_words"),
    "allowed_token_ids",
)
# Fields of a chat that an answer from the index obeys, besides those of sampling.
_WITH_INDEX = ("messages", "stream", "stream_options")
# Names of the same limit.
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict")


_OPENAI_WRITING: Accepted = {
    "prediction": ANY,  # speeds a text up and changes none
    "verbosity": ("medium",),
}

_VLLM_WRITING: Accepted = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": ANY,  # of special tokens, which are not shown
    "detokenize": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_reasoning": (True,),
    "guided_decoding_backend": ANY,
    "stream_interval": ANY,
    "logits_processors": ([],),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_token_ids", "return_token_offsets"), (False,)),
    "return_prompt_text": (False,),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs"), ({},)),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), ({},)),
}

LLAMA_CPP: Accepted = {
    # Where and how fast it is computed.
    **dict.fromkeys(("cache_prompt", "id_slot", "slot_id", "parse_tool_calls"), ANY),
    **dict.fromkeys(("speculative.n_max", "speculative.n_min", "speculative.p_min"), ANY),
    # Samplers that are off, and the settings that only matter when they are on.
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "n_probs", "n_keep"), (0,)),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold"), ANY),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), ANY),
    **dict.fromkeys(("repeat_penalty", "tfs_z"), (1,)),
    "repeat_last_n": ANY,
    "min_keep": (0,),
    **dict.fromkeys(("n_indent", "t_max_prompt_ms", "t_max_predict_ms"), (0, -1)),
    **dict.fromkeys(("lora", "response_fields"), ([],)),
    # Additions to the answer that are off.
    **dict.fromkeys(("penalize_nl", "post_sampling_probs", "return_tokens", "return_progress"), (False,)),
    "timings_per_token": (False,),
    "reasoning_format": ("none", "auto"),
}

_WRITING: Accepted = {**_OPENAI_WRITING, **_VLLM_WRITING, **LLAMA_CPP}


def template_options(
    add_generation_prompt: bool | None, continue_final_message: bool | None, variables: dict[str, Any] | None
) -> TemplateOptions:
    """Return the options for rendering messages with a chat template."""
    if continue_final_message and add_generation_prompt:
        raise ApiError(
            "continue_final_message and add_generation_prompt contradict each other; set one of them",
            param="continue_final_message",
        )
    continues = bool(continue_final_message)
    opens = not continues if add_generation_prompt is None else add_generation_prompt
    return TemplateOptions(add_generation_prompt=opens, continue_final_message=continues, variables=variables or {})


def refuse_first(requested: dict[str, bool], where: str = "here") -> None:
    """Raise an error for the first field that is requested."""
    for name, is_requested in requested.items():
        if is_requested:
            raise unsupported(name, f"{name} is not supported {where}; leave it out")


def _biases(given: Any) -> Any:
    """Raise an error for the first invalid entry only, since pydantic would describe all of them."""
    if isinstance(given, dict):
        for key, bias in given.items():
            if not isinstance(key, str) or not key.isascii() or not key.isdigit() or len(key) > 10:
                raise ValueError(f"{str(key)[:40]!r} is no token id; give ids as keys, such as {{'42': -100}}")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                raise ValueError(f"the bias of token {key} is no number from -100 to 100")
    return given


class StreamOptions(Body):
    """Options of a stream."""

    without_effect: ClassVar[Accepted | None] = {"include_obfuscation": ANY, "continuous_usage_stats": (False,)}
    include_usage: bool | None = None


class JsonSchema(Body):
    """A JSON schema with its name."""

    without_effect: ClassVar[Accepted | None] = {"description": ANY}
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(Body):
    """Structured output, as OpenAI's API has it."""

    without_effect: ClassVar[Accepted | None] = {"name": ANY, "strict": ANY, "description": ANY}
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """The schema where llama.cpp takes it."""

    @property
    def form(self) -> GenerationKeywords | None:
        """The ``schema`` argument; None for any text."""
        in_json_schema = None if self.json_schema is None else self.json_schema.schema_
        schema = self.schema_ if in_json_schema is None else in_json_schema
        if self.type == "text":
            if schema is not None:
                raise ApiError("response_format of type text takes no schema", param="response_format")
            return None
        if schema is None and self.type == "json_schema":
            raise ApiError("response_format of type json_schema needs json_schema.schema", param="response_format")
        return {"schema": {"type": "object"} if schema is None else schema}


class StructuredOutputs(Body):
    """Structured output, as vLLM's API has it."""

    without_effect: ClassVar[Accepted | None] = {
        **dict.fromkeys(("backend", "_backend", "disable_fallback"), ANY),
        **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (False,)),
    }
    json_: Annotated[dict[str, Any] | Text | None, Field(alias="json")] = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Texts | None = None
    grammar: Any = None
    structural_tag: Any = None

    @property
    def form(self) -> GenerationKeywords:
        """The arguments of ``generate``, which raises an error for several."""
        form: GenerationKeywords = {}
        if self.json_ is not None:
            form["schema"] = self.json_
        elif self.json_object:
            form["schema"] = {"type": "object"}
        if self.regex is not None:
            form["regex"] = self.regex
        if self.choice is not None:
            form["choice"] = self.choice
        return form


class Sampled(RequestBody):
    """Fields for sampling."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Above0 | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Fraction | None = None
    typical_p: Above0 | None = None
    repetition_penalty: Annotated[float, Field(ge=0.1, le=10)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_biases)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None

    def sampling(self, temperature: float) -> Sampling:
        """Return the sampling settings, with this temperature if the request has none."""
        return Sampling(
            temperature=temperature if self.temperature is None else self.temperature,
            top_p=None if self.top_p == 1 else self.top_p,
            top_k=None if self.top_k is None or self.top_k < 1 else self.top_k,
            min_p=self.min_p or None,
            typical_p=None if self.typical_p == 1 else self.typical_p,
            seed=self.seed,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            logit_bias={int(token): bias for token, bias in (self.logit_bias or {}).items()},
        )


class GenerationBody(Sampled):
    """Fields that chats and completions share."""

    without_effect: ClassVar[Accepted | None] = _WRITING
    max_tokens: Count | None = None
    max_new_tokens: Count | None = None
    """Its name in transformers."""
    n_predict: Count | None = None
    """Its name in llama.cpp."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MOST_BANNED, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MOST_BANNED, fail_fast=True)] | None = None
    allowed_token_ids: Ids | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Keep the last ``n`` tokens of the prompt; -1: as many as leave room for the completion."""
    n: Choices | None = None
    best_of: Choices | None = None
    """Sample this many completions and return the ``n`` with the best scores."""
    scorer: ScorerName | None = None
    """The scorer for ``best_of``; default: the model's trained scorer if it has one, else ``pmi``."""
    stop: Stop | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_choice: Texts | None = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None

    def refuse_unsupported(self) -> None:
        """Raise an error for fields that other servers act on and this one would ignore."""
        structured = self.structured_outputs
        refuse_first({
            "functions": bool(self.functions) and self.function_call != "none",
            "modalities": self.modalities not in (None, [], ["text"]),
            "audio": bool(self.audio),
            "web_search_options": self.web_search_options is not None,
            "structured_outputs.grammar": structured is not None and bool(structured.grammar),
            "structured_outputs.structural_tag": structured is not None and bool(structured.structural_tag),
            "guided_grammar": bool(self.guided_grammar),
            "grammar": bool(self.grammar),
            "json_schema": self.json_schema is not None,
        })  # fmt: skip

    @property
    def forms(self) -> dict[str, GenerationKeywords]:
        """Arguments for structured output, by the field that they come from."""
        forms: dict[str, GenerationKeywords | None] = {
            "response_format": None if self.response_format is None else self.response_format.form,
            "structured_outputs": None if self.structured_outputs is None else self.structured_outputs.form,
            "guided_json": None if self.guided_json is None else {"schema": self.guided_json},
            "guided_regex": None if self.guided_regex is None else {"regex": self.guided_regex},
            "guided_choice": None if self.guided_choice is None else {"choice": self.guided_choice},
        }
        return {name: form for name, form in forms.items() if form}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        """The number of completions that are returned per prompt."""
        return self.n or 1

    @property
    def samples(self) -> int:
        """The number of completions that are generated per prompt."""
        if self.best_of is not None and self.best_of < self.choices:
            raise ApiError(f"best_of={self.best_of} leaves fewer texts than n={self.choices}", param="best_of")
        if self.ranks and self.stream:
            raise ApiError("what is ranked cannot be streamed; leave best_of or stream out", param="best_of")
        if self.scorer is not None and not self.ranks:
            raise ApiError("scorer ranks the texts of best_of; set best_of above 1, or leave it out", param="scorer")
        return self.best_of or self.choices

    @property
    def ranks(self) -> bool:
        """Whether a scorer ranks the completions."""
        return (self.best_of or 1) > 1

    @property
    def requested_tokens(self) -> int | None:
        """The requested maximum of completion tokens; None if the request has none."""
        limits = {name: value for name in _LENGTHS if (value := getattr(self, name, None)) is not None}
        if len(set(limits.values())) > 1:
            first, second, *_ = limits
            raise ApiError(f"{first} and {second} both say how many tokens to generate; leave one out", param=second)
        return next(iter(limits.values()), None)

    def settings(self, max_new_tokens: int, logprobs: int | None) -> GenerationConfig:
        """Return the settings for one prompt."""
        forms = self.forms
        if len(forms) > 1:
            first, second, *_ = forms
            raise ApiError(f"{first} and {second} both say which form the text has; leave one out", param=second)
        options: GenerationKeywords = {"n": self.samples, "stop": self.stop, "logprobs": logprobs}
        options |= {name: getattr(self, name) for name in _LIMITS if getattr(self, name) is not None}  # type: ignore[typeddict-item]
        for form in forms.values():
            options.update(form)
        return GenerationConfig.of(max_new_tokens, self.sampling(1.0), options)


class Part(Body):
    """A part of a message."""

    without_effect: ClassVar[Accepted | None] = {"cache_control": ANY, "annotations": ANY}
    type: Text
    text: str | None = None
    # Declared, so that the error names the part's type and not this field.
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    audio_url: Any = None
    video_url: Any = None


def text_parts(parts: Sequence[Any], where: str, kinds: Collection[str] = ("text",)) -> list[dict[str, str]]:
    """Return the parts of a message in the form of templates; raise an error for one that is no text."""
    for number, part in enumerate(parts):
        if part.type not in kinds or part.text is None:
            place = f"{where}.{number}"
            raise unsupported(place, f"{place} is of type {part.type[:60]!r}, and this server reads text alone")
    return [{"type": "text", "text": part.text} for part in parts]


class Message(Body):
    """One turn of a conversation."""

    without_effect: ClassVar[Accepted | None] = {
        **dict.fromkeys(("id", "annotations", "cache_control", "provider_specific_fields"), ANY),
        **dict.fromkeys(("reasoning_content", "reasoning", "refusal"), ("",)),
        **dict.fromkeys(("images", "thinking_blocks"), ([],)),
        "prefix": (False,),
        "type": ("message",),
    }
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: MessageCalls | None = None
    function_call: Any = None
    tool_call_id: Annotated[str, Field(max_length=200)] | None = None


class ChatRequest(GenerationBody):
    """A conversation to be answered."""

    without_effect: ClassVar[Accepted | None] = {
        **_WRITING,
        "echo": (False,),
        "add_special_tokens": (False,),
        "documents": ([],),
    }
    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    """Continue the last message, instead of starting the next one."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template, such as ``{"enable_thinking": false}``."""
    tools: Tools | None = None
    tool_choice: Choice | ChosenTool | None = None
    parallel_tool_calls: bool | None = None

    def tool_keywords(self, tool_prompt: Any) -> ToolKeywords:
        """Return the tools as ``chat`` takes them."""
        if self.tools and self.ranks:
            raise ApiError("best_of ranks texts, not tool calls; leave best_of or tools out", param="best_of")
        chosen = self.tool_choice
        choice = chosen.function.name if isinstance(chosen, ChosenTool) else chosen
        return {
            "tools": plain(self.tools),
            # Clients may send it without tools.
            "tool_choice": choice if self.tools or choice not in ("auto", "none") else None,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_prompt": tool_prompt,
        }

    @property
    def requested_logprobs(self) -> int | None:
        """The number of alternatives per token; None for no log-probabilities."""
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template(self) -> TemplateOptions:
        """Options for rendering the messages."""
        return template_options(self.add_generation_prompt, self.continue_final_message, self.chat_template_kwargs)

    def refuse_with_index(self) -> None:
        """Raise an error for fields that an answer from the index has no use for."""
        kept = (*_WITH_INDEX, *_LENGTHS, *Sampled.model_fields, "tool_choice", "parallel_tool_calls", "n", "best_of")
        other_fields = {name: bool(getattr(self, name)) for name in type(self).model_fields if name not in kept}
        refuse_first({"n": self.choices > 1, "best_of": self.ranks, **other_fields}, "with an index")

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages as ``chat`` takes them."""
        self.refuse_unsupported()
        conversation = []
        for number, message in enumerate(self.messages):
            where = f"messages.{number}"
            if message.function_call or message.role == "function":
                raise unsupported(
                    where, f"{where}: functions are not supported; use tools, tool_calls and the role tool"
                )
            if message.tool_calls and message.role != "assistant":
                raise ApiError(f"{where}: tool_calls belong to the role assistant", param=f"{where}.tool_calls")
            content: Any = message.content
            if isinstance(content, list):
                content = text_parts(content, f"{where}.content")
            if content is None and message.tool_calls:
                content = ""
            if content is None:
                raise ApiError(f"{where} has no content; give a text", param=f"{where}.content")
            # OpenAI's role `developer` is `system` in chat templates.
            role = "system" if message.role == "developer" else message.role
            conversation.append(
                {
                    "role": role,
                    "content": content,
                    "name": message.name,
                    "tool_calls": plain(message.tool_calls) or None,
                    "tool_call_id": message.tool_call_id if role == "tool" else None,
                }
            )
        return conversation


B = TypeVar("B", bound=GenerationBody)


class CompletionRequest(GenerationBody):
    """One or several texts to be continued; with ``suffix`` a gap to be filled."""

    without_effect: ClassVar[Accepted | None] = {**_WRITING, "add_special_tokens": (True,), "parallel_tool_calls": ANY}
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    """0 only with ``echo``: nothing is written, and the prompt comes back with its log-probabilities."""
    prompt: str | Annotated[list[str], Field(min_length=1, max_length=256, fail_fast=True)] | Ids | ManyIds
    suffix: str | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Any = None
    tool_choice: Any = None

    def refuse_unsupported(self) -> None:
        """Raise an error for fields that other servers act on and this one would ignore."""
        super().refuse_unsupported()
        refuse_first({
            "tools": bool(self.tools) and self.tool_choice != "none",
            "tool_choice": self.tool_choice not in (None, "none", "auto"),
        })  # fmt: skip

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, one or many."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt

    def refuse_with_suffix(self) -> None:
        """Raise an error for fields that infilling would ignore."""
        refuse_first(
            {
                "n": self.choices != 1,
                "best_of": self.ranks,
                "stop": bool(self.stop),
                "logprobs": self.logprobs is not None,
                "echo": bool(self.echo),
                **dict.fromkeys(self.forms, True),
                **{name: bool(getattr(self, name)) for name in (*_LIMITS, "truncate_prompt_tokens")},
            },
            "beside suffix",
        )
        if (self.requested_tokens or 0) > MOST_FILLED:
            raise ApiError(f"beside suffix max_tokens is {MOST_FILLED} at most", param="max_tokens")
        self.refuse_no_tokens()

    def refuse_no_tokens(self) -> None:
        """Raise an error if the answer would be empty."""
        if self.requested_tokens == 0 and not self.echo:
            raise ApiError("max_tokens: 0 needs echo; else nothing would be answered", param="max_tokens")


def translated(kind: type[B], fields: dict[str, Any]) -> B:
    """Return a body of OpenAI's API from fields that were checked already."""
    fields = {name: value for name, value in fields.items() if value is not None}
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        errors: list[Any] = [{**item, "loc": ("body", *item["loc"])} for item in error.errors()]
        param, message, code = worst(errors, fields)
        raise ApiError(message, param=param or None, code=code) from error
