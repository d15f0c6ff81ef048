"""Generation settings: number of tokens, sampling, stop conditions and output format. Imports no torch."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from gerund.checks import check_unicode, flag, is_listing, whole_number
from gerund.errors import ConfigError, unknown_name
from gerund.settings.aliases import Alias, names_of
from gerund.settings.sampling import (
    GREEDY,
    MOST_AT_ONCE,
    Rerank,
    RerankKeywords,
    Sampling,
    SamplingKeywords,
    sampling_from,
    sampling_or,
    take_rerank,
)

# Sampling for ranked completions and expansions where you pass none (RankGen, section 3.2).
NUCLEUS = Sampling(temperature=1.0, top_p=0.9)
# More alternatives per token are likely a mistake.
_MOST_LOGPROBS = 1000
_FORMS = ("schema", "regex", "choice")
_LIMITS = (
    *("min_tokens", "stop_token_ids", "bad_words", "allowed_token_ids"),
    *("ignore_eos", "include_stop_str_in_output"),
)


@dataclass(frozen=True)
class Constraint:
    """A constraint on the generated text.

    Attributes:
        kind: ``schema``, ``regex``, ``choice`` or ``tools``.
        source: the JSON schema as JSON, the regular expression, the list of choices as JSON, or a grammar of tool calls
            in llguidance's Lark syntax.
    """

    kind: Literal["schema", "regex", "choice", "tools"]
    source: str


ToolPrompt = Literal["generic", "smollm2"]
"""How tools are described to a model whose chat template knows none: in words for any model, or in those that SmolLM2
was trained on."""

_RESPONSE_FORMATS = ("text", "json_object", "json_schema")


def _schema_of(response_format: Any) -> Any:
    """Return the schema in OpenAI's ``response_format``; None for any text. A class of pydantic is a schema itself."""
    if not isinstance(response_format, Mapping):
        return response_format
    kind, named = response_format.get("type"), response_format.get("json_schema")
    if kind not in _RESPONSE_FORMATS:
        raise unknown_name("type of response_format", kind, _RESPONSE_FORMATS)
    if kind != "json_schema":
        return None if kind == "text" else {"type": "object"}
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if schema is None:
        raise ConfigError('response_format of type json_schema needs a schema: {"json_schema": {"schema": ...}}')
    return schema


class GenerationKeywords(SamplingKeywords, total=False):
    """Options of generation besides ``max_new_tokens``; all have defaults.

    The fields of ``Sampling`` are keywords too, instead of ``sampling``.
    """

    max_tokens: Annotated[int | None, Alias("max_new_tokens")]
    """OpenAI's name of ``max_new_tokens``."""

    response_format: Annotated[Any, Alias("schema", _schema_of)]
    """``schema`` as OpenAI writes it: ``{"type": "json_schema", "json_schema": {"schema": ...}}``, or
    ``{"type": "json_object"}``."""

    n: int
    """Number of completions per prompt; above 1 they are sampled. 1."""

    stop: str | Sequence[str] | None
    """Strings before which the text ends. They are searched in the new text only, across tokens. A string that spells a
    control token, such as ``<|im_end|>``, means that token."""

    logprobs: int | None
    """Return the log-probability of each token, and of this many most likely alternatives; 0 for no alternatives.
    None returns no log-probabilities."""

    schema: Any
    """The text is JSON that this JSON schema allows: a dict, its JSON, or a class of pydantic. ``{}`` allows any JSON.
    Needs llguidance: ``pip install 'gerund[structured]'``."""

    regex: str | None
    """The full text matches this regular expression, in the syntax of Rust's regex crate. Needs llguidance."""

    choice: Sequence[str] | None
    """The text is one of these. Needs llguidance."""

    min_tokens: int
    """Number of tokens before which no end token, stop token or stop string ends the text. A complete ``schema``,
    ``regex`` or ``choice`` does. 0."""

    stop_token_ids: Sequence[int] | None
    """Tokens that end the text; like a stop string, the token is not part of it."""

    bad_words: Sequence[str] | None
    """Strings that never occur in the new text, not even as part of a word or across tokens. ``" ass"`` with a space
    leaves ``class`` alone. What the prompt says doesn't matter."""

    allowed_token_ids: Sequence[int] | None
    """The only tokens that may be generated. The text ends early only if an end token is one of them."""

    ignore_eos: bool
    """Generate past the model's end tokens, until ``max_new_tokens`` or a stop string or token. False."""

    include_stop_str_in_output: bool
    """Keep the stop string or token that ends the text. Control tokens are never part of a text. False."""


_OPTIONS = names_of(GenerationKeywords)


class RankedKeywords(GenerationKeywords, RerankKeywords, total=False):
    """Options of generation where completions may be ranked."""


@dataclass(frozen=True)
class GenerationConfig:
    """The settings of one generation request; ``of`` builds them from the arguments of ``LanguageModel.generate``.

    >>> GenerationConfig.of(20, Sampling(temperature=1.0, seed=1), {"n": 2, "stop": "END"}).stop
    ('END',)
    >>> GenerationConfig(max_new_tokens=20, stop="END").stop
    ('END',)

    Attributes:
        max_new_tokens: tokens to generate at most.
        sampling: how tokens are chosen.
        n: number of completions per prompt.
        stop: strings before which the text ends.
        logprobs: number of alternatives per token; None for no log-probabilities.
        constraint: schema, regex or choices that the text must match.
        min_tokens: tokens before which only a complete ``constraint`` ends the text.
        stop_token_ids: tokens that end the text.
        bad_words: strings that never occur in the text.
        allowed_token_ids: the only tokens that may be generated; None for all.
        ignore_eos: whether to generate past the model's end tokens.
        include_stop_str_in_output: whether the text includes the stop string or token that ended it.
        spelled_tokens: control tokens that stay in the text, such as those that precede a tool call.

    Raises:
        ConfigError: a setting is impossible, or contradicts another.
    """

    max_new_tokens: int = 64
    sampling: Sampling = field(default_factory=Sampling)
    n: int = 1
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    constraint: Constraint | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    spelled_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sampling, n, logprobs = sampling_or(self.sampling), whole_number("n", self.n), self.logprobs
        if not 1 <= n <= MOST_AT_ONCE:
            raise ConfigError(f"n={n} is not between 1 and {MOST_AT_ONCE}")
        if n > 1 and sampling.is_greedy:
            raise ConfigError(
                "greedy continuations of one prompt are all the same; set a temperature above 0, such as 1, or n=1"
            )
        if logprobs is not None and not 0 <= whole_number("logprobs", logprobs) <= _MOST_LOGPROBS:
            raise ConfigError(f"logprobs={logprobs} is not between 0 and {_MOST_LOGPROBS}")
        if not isinstance(self.constraint, Constraint | None):
            raise ConfigError(f"constraint is a Constraint, not {self.constraint!r}")
        checked = {
            "max_new_tokens": require_new_tokens(self.max_new_tokens),
            "sampling": sampling,
            "n": n,
            "stop": _stop_strings(self.stop),
            "spelled_tokens": tuple(self.spelled_tokens),
            "logprobs": None if logprobs is None else int(logprobs),
            **self._checked_limits(),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def _checked_limits(self) -> dict[str, Any]:
        """Validate the settings that limit tokens and stop conditions."""
        least = whole_number("min_tokens", self.min_tokens)
        if least < 0:
            raise ConfigError(f"min_tokens={least} is negative; 0 lets the text end anywhere")
        allowed = None if self.allowed_token_ids is None else _token_ids("allowed_token_ids", self.allowed_token_ids)
        if allowed == ():
            raise ConfigError("allowed_token_ids is empty, so nothing could be generated; leave it out to allow all")
        if self.ignore_eos and self.constraint is not None:
            raise ConfigError(
                f"ignore_eos contradicts {self.constraint.kind}: nothing can follow a complete text of that form"
            )
        return {
            "min_tokens": least,
            "stop_token_ids": _token_ids("stop_token_ids", self.stop_token_ids),
            "bad_words": _strings("bad_words", self.bad_words, "would ban every text"),
            "allowed_token_ids": allowed,
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "include_stop_str_in_output": flag("include_stop_str_in_output", self.include_stop_str_in_output),
        }

    @classmethod
    def of(
        cls, max_new_tokens: int, sampling: Sampling | None, options: GenerationKeywords, default: Sampling = GREEDY
    ) -> Self:
        """Return checked settings.

        Args:
            max_new_tokens: how much to write at most.
            sampling: how tokens are chosen; None leaves it to the options.
            options: everything else, as keywords of ``LanguageModel.generate`` by name.
            default: how tokens are chosen where nothing is said of it.

        Raises:
            ConfigError: a setting is impossible, or contradicts another.
        """
        for name in options:
            if name not in _OPTIONS:
                raise unknown_name("setting", name, _OPTIONS)
        limits: dict[str, Any] = {name: options[name] for name in _LIMITS if options.get(name) is not None}  # type: ignore[literal-required]
        config = cls(
            max_new_tokens=max_new_tokens,
            sampling=sampling_from(sampling, options, default),
            n=options.get("n", 1),
            stop=_stop_strings(options.get("stop")),
            logprobs=options.get("logprobs"),
            constraint=_constraint(options),
            **limits,
        )
        if config.min_tokens > config.max_new_tokens:
            raise ConfigError(f"min_tokens={config.min_tokens} is more than max_new_tokens={config.max_new_tokens}")
        return config

    def refuse_with_rerank(self) -> None:
        """Refuse what a search among ranked continuations does not do.

        Raises:
            ConfigError: something of that kind is asked for.
        """
        given = {"n": self.n != 1, "stop": self.stop, "logprobs": self.logprobs is not None}
        given["schema, regex or choice"] = self.constraint is not None
        given |= {name: bool(getattr(self, name)) for name in _LIMITS}
        for name, value in given.items():
            if value:
                more = " and lists all candidates" if name == "n" else ""
                raise ConfigError(
                    f"`{name}` can't be combined with `rerank`, which returns the best continuation{more}. Remove one."
                )


def generation_config(
    max_new_tokens: int, sampling: Sampling | None, rerank: Rerank | None, options: RankedKeywords
) -> tuple[GenerationConfig, Rerank | None]:
    """Return checked settings and how completions are ranked; a search among them samples and ends where it likes."""
    rerank = take_rerank(rerank, options)
    if rerank is None:
        return GenerationConfig.of(max_new_tokens, sampling, options), None
    settings = GenerationConfig.of(max_new_tokens, sampling, options, NUCLEUS)
    settings.refuse_with_rerank()
    return settings, rerank


def require_new_tokens(max_new_tokens: int) -> int:
    """Validate ``max_new_tokens``."""
    count = whole_number("max_new_tokens", max_new_tokens)
    if count < 1:
        raise ConfigError(f"`max_new_tokens` must be at least 1, got {count}.")
    return count


def _stop_strings(stop: Any) -> tuple[str, ...]:
    return _strings("stop", stop, "would end every text at once")


def _strings(name: str, given: Any, empty: str) -> tuple[str, ...]:
    """Return a string or several as a tuple; ``empty`` describes the effect of an empty one."""
    if given is None:
        return ()
    listed = [given] if isinstance(given, str) else list(given) if is_listing(given) else None
    if listed is None or not all(isinstance(text, str) for text in listed):
        raise ConfigError(f"{name} is a text or a list of texts, not {given!r}")
    if "" in listed:
        raise ConfigError(f"{name} has an empty string, which {empty}; leave it out")
    for text in listed:
        check_unicode(name, text)
    return tuple(dict.fromkeys(listed))


def _token_ids(name: str, given: Any) -> tuple[int, ...]:
    if given is None:
        return ()
    if not is_listing(given):
        raise ConfigError(f"{name} is a list of token ids, such as [13], not {given!r}")
    ids = tuple(dict.fromkeys(whole_number(f"a token id of {name}", token) for token in given))
    negative = next((token for token in ids if token < 0), None)
    if negative is not None:
        raise ConfigError(f"{name} has the token id {negative}, and token ids start at 0")
    return ids


def _constraint(options: GenerationKeywords) -> Constraint | None:
    given = [name for name in _FORMS if options.get(name) is not None]
    if len(given) > 1:
        raise ConfigError(f"Pass only one of {', '.join(f'`{name}`' for name in given)}.")
    if not given:
        return None
    if given == ["schema"]:
        return Constraint("schema", _schema_json(options["schema"]))
    if given == ["regex"]:
        regex = options["regex"]
        if not isinstance(regex, str) or not regex:
            raise ConfigError(f"regex is a regular expression, not {regex!r}")
        check_unicode("regex", regex)
        return Constraint("regex", regex)
    choice = options["choice"]
    texts = list(choice) if is_listing(choice) else []  # type: ignore[arg-type]
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"choice is a list of texts, none of them empty, not {choice!r}")
    for text in texts:
        check_unicode("choice", text)
    return Constraint("choice", json.dumps(list(dict.fromkeys(texts))))


def _schema_json(schema: Any) -> str:
    """Return a JSON schema as JSON."""
    if hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"schema is not valid JSON: {error}") from error
    if not isinstance(schema, Mapping):
        raise ConfigError(f"schema is a JSON schema, such as {{'type': 'object'}}, not {schema!r}")
    try:
        # Keys are not sorted: the generated object has their order.
        return json.dumps(dict(schema), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"schema cannot be written as JSON: {error}") from error
