"""Encoder settings: ``EncoderConfig``, how a language model is used as an encoder.

``LateConfig`` (``late.json`` in a model's folder) says how texts are read for late interaction, ``AnswerConfig``
(``answers.json``) how for answer tokens.

Knows: names, ranges, JSON. Does not know: torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Never, Self, TypeVar, get_args

from pydantic import BeforeValidator, InstanceOf

from gerund.checks import demand_fields, one_of, read_json, whole_number
from gerund.errors import ConfigError, DataError, unknown_name
from gerund.poolings import CONCATENATED, POOLINGS, canonical_pooling, pooling_parts
from gerund.settings.fields import (
    AUTO_ADAPTER,
    NO_ADAPTER,
    Auto,
    Count,
    Fraction,
    Layers,
    Text,
    Texts,
    Unset,
    check,
    documented,
    named,
    setting,
)
from gerund.settings.plan import AttentionPlan, ResolvedPlan
from gerund.settings.ranking import TRAINED_FUSION, UNTRAINED_FUSION, RelevanceMeasure
from gerund.settings.templates import (
    HIDDEN,
    LAST_LAYER,
    NAMED,
    NO_REROUTE,
    NO_TEMPLATE,
    NO_TRANSFORM,
    Template,
    check_layers,
    check_reroute,
    choose_prompt,
    is_template,
    layer_numbers,
    rerouted_layers,
    templates_around,
    templates_of,
    transform_parts,
)

CONFIG_FILE = "gerund.json"
DEFAULT_MODEL = "default"
"""Means the bundled model wherever a model is named; a folder of that name is ``./default``."""
FORMAT = 1
ExportFormat = Literal[
    "sentence-transformers", "multi-vector", "merged", "onnx", "onnx-int8", "openvino", "gguf", "gguf-embedding"
]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
GgufType = Literal["f32", "bf16", "f16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0"]
GGUF_TYPES: tuple[GgufType, ...] = get_args(GgufType)
InfillMethod = Literal["infill", "left-only", "blank", "contextual", "prefix-suffix", "line-by-line"]
INFILL_METHODS: tuple[InfillMethod, ...] = get_args(InfillMethod)
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16")

Job = Literal["encode", "infill", "score", "rerank"]
"""What a model does with an adapter active; it generates with none."""
JOBS: tuple[Job, ...] = get_args(Job)

ST_CONVENTIONS: Literal["sentence-transformers"] = "sentence-transformers"
LLM2VEC_CONVENTIONS: Literal["llm2vec"] = "llm2vec"
Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]
SIMILARITIES: tuple[Similarity, ...] = get_args(Similarity)

Plan = TypeVar("Plan")
PoolingName = Annotated[str, BeforeValidator(lambda name: canonical_pooling(name) if type(name) is str else name)]


def unknown_dtype(dtype: object) -> ConfigError:
    """Return the error for a dtype that does not exist; of ``int8`` it says what computes in 8 bits instead."""
    if dtype == "int8":
        return ConfigError(
            "there is no dtype int8: 8-bit weights are computed by the packed runtime. Write them with "
            "gerund export MODEL OUT --format gguf --type q8_0 and load OUT/model.gguf, or leave dtype out"
        )
    return unknown_name("dtype", dtype, DTYPE_NAMES)


@dataclass(frozen=True)
class EncoderSettings(Generic[Auto, Unset]):
    """The settings of an encoder but for its attention plan, each declared here alone."""

    pooling: Annotated[PoolingName, named(pooling_parts)] | Unset = setting(
        "mean",
        f"How token states become one vector: {', '.join(POOLINGS)}; of several, such as first+mean, the vectors are "
        "concatenated. sentence-transformers' names, such as cls and lasttoken, are accepted too.",
    )
    prompt: Text | Unset = setting(
        "",
        "Text put before every text, unless the call gives another; with {text}, around it, as its template. Control "
        "tokens such as <s> are parsed in it, though never in a text. For a reranker, what it is asked to find.",
    )
    prompts: Texts | Unset = setting(
        {},
        "Prompts by name, for encode(..., prompt_name=NAME). Searches and rerank use those named query and document.",
    )
    pool_prompt: bool | Unset = setting(
        False, "Pool the prompt's tokens (and the beginning-of-text token before them) as well."
    )
    append_eos: bool | Unset = setting(
        False, "Put an end token after every text; the pooling last then takes its state."
    )
    normalize: bool | Unset = setting(True, "Give every vector length 1, unless the call says otherwise.")
    max_length: Count | Auto | Unset = setting(
        None, "Longest text in tokens, prompt and special tokens included. Default: what the model was made for."
    )
    template: Annotated[Text, named(templates_of)] | Unset = setting(
        NO_TEMPLATE,
        f"Text put around a text: {', '.join(NAMED)}, or any text with {{text}}; none. A named one also sets the "
        "pooling that it was published with, unless another is given.",
    )
    layers: Annotated[str, named(check_layers)] | Unset = setting(
        LAST_LAYER,
        "Layers whose states are averaged before pooling: last, all, 6, -2 (from the end), 4-8 or 1+8.",
    )
    exit_layer: Count | Auto | Unset = setting(
        None,
        "Early exit: texts are read by the first so many layers alone, then by the final norm; those above are not "
        "computed. The plan's k counts from the top of the layers that are read. Default: all layers.",
    )
    states: Literal["hidden", "values", "attention"] | Unset = setting(
        "hidden",
        "What is read of those layers: hidden (states), values (of the attention: value aggregation), or attention "
        "(its output: AlignedWVA, with a template and pooling last).",
    )
    generated: Layers | Unset = setting(
        0, "Let the model continue a text (in its template) by this many tokens, and pool their states; 0 for none."
    )
    prepend: Layers | Unset = setting(
        0, "Token Prepending: below this layer the last token's state replaces a token of the template; 0 for none."
    )
    reroute: Annotated[str, named(check_reroute)] | Unset = setting(
        NO_REROUTE,
        "KV-Embedding: layers in which the last token's key and value are put before the text, visible to all tokens: "
        "all, 6, 4-8 or 1+8; none. lm.rerouting_layers(texts) chooses some.",
    )
    transform: Annotated[str, named(transform_parts)] | Unset = setting(
        NO_TRANSFORM,
        "Transform of pooled vectors, fitted on a sample of texts: standardization; whitening or all-but-the-top, with "
        "-N for the dimensions kept or the directions removed; truncate-128 keeps the first 128 dimensions, without a "
        "sample; none.",
    )
    pool_bos: Literal["auto", "always", "never"] | Unset = setting(
        "auto",
        "Pool the special tokens before a text without a prompt: always (as LBW evaluates), never (as LBW trains), or "
        "auto: unless the plan hides them.",
    )
    text_normalization: Literal["nfkc", "none"] | Unset = setting(
        "nfkc",
        "Normalize texts before they are encoded: nfkc (no invisible characters or hyphens at line ends either), so "
        "that texts that look the same get the same vector, or none. Prompts are never changed.",
    )
    fusion: Fraction | Auto | Unset = setting(
        None,
        "Weight of the vectors in hybrid search, from 0 (words alone) to 1 (vectors alone). No vector depends on it. "
        f"Default: {TRAINED_FUSION} for a model that was trained to embed, {UNTRAINED_FUSION} for others.",
    )
    rerank_by: RelevanceMeasure | Auto | Unset = setting(
        None,
        "How rerank and searches measure relevance: lift, mixed, likelihood, maxsim, vectors, model, yesno, listwise "
        "or attention. Default: lift for a language model, vectors for an encoder. No vector depends on it.",
    )
    rerank_weight: Fraction | Auto | Unset = setting(
        None,
        "Weight of that measure beside the scores of a first stage, from 0 (these alone) to 1. Default: 0.5. No vector "
        "depends on it.",
    )
    conventions: Literal["gerund", "sentence-transformers", "llm2vec"] | Unset = setting(
        "gerund",
        "Conventions where libraries differ: gerund, or sentence-transformers, as for every ready-made encoder. There "
        "the prompt is as long as it is alone, its tokens count in the weights of a weighted mean, and max_length may "
        "be above the tokenizer's own limit. llm2vec: what a prompt puts after a text is pooled with it.",
    )
    similarity: Similarity | Unset = setting(
        "cosine",
        "How lm.similarity compares vectors: cosine, dot, euclidean or manhattan (the last two negative, so that more "
        "is nearer). No vector depends on it.",
    )


_DEFAULTS = {field.name: field.default for field in fields(EncoderSettings)}
# Settings that came later than the others: at their default they are neither saved nor hashed, so that fingerprints
# stay what they were.
_METHODS = (
    *("template", "layers", "exit_layer", "states", "generated", "prepend", "reroute", "transform", "pool_bos"),
    "text_normalization",
)
METHODS = {name: _DEFAULTS[name] for name in _METHODS}
"""Defaults of the settings of methods without training."""
RANKING = ("fusion", "rerank_by", "rerank_weight")
"""Settings of searches, which no vector depends on."""
MAY_BE_AUTO = ("max_length", "exit_layer", *RANKING)
"""Settings whose default is None in a config, and "auto" where None means that they were left out."""
READING = {name: _DEFAULTS[name] for name in ("conventions", "similarity")}
"""Defaults of settings that a ready-made encoder brings along."""


@dataclass(frozen=True)
class PlanChoice(Generic[Plan]):
    """The setting that names the attention plan: a plan in a config, a name in a spec."""

    attention: Plan = setting(
        AttentionPlan(),
        "Attention plan, such as mask0-bidir: which tokens each layer may attend to. A name of gerund.PLAN_NAMES; in "
        "Python also an AttentionPlan.",
    )


@documented
@dataclass(frozen=True)
class EncoderConfig(EncoderSettings[None, Never], PlanChoice[InstanceOf[AttentionPlan]]):
    """How a language model is used as an encoder."""

    def __post_init__(self) -> None:
        check(self)
        for text in (self.prompt, *self.prompts.values()):
            templates_around(text, self.templates, self.attention.name)
        if self.prepend == 1:
            raise ConfigError("prepend=1: the first layer that can take a state over is the second one")
        if self.prepend and not self.templates:
            raise ConfigError("prepend puts a token into a template, such as template='prompteol'; give one")
        once = self.attention.takes_skips and not self.attention.skips
        by_name = (
            ("prepend", self.prepend),
            ("reroute", self.reroute != NO_REROUTE),
            (f"states={self.states}", self.states != HIDDEN),
        )
        for name, used in by_name:
            if used and self.attention.skips:
                raise ConfigError(f"{name} and skips do not go together")
            if used and not once:
                raise ConfigError(f"{name} is for plans that run each layer once, not for {self.attention.name!r}")
        self._check_generated()

    def _check_generated(self) -> None:
        if not self.generated:
            return
        if self.attention.name != "causal" or self.attention.skips:
            raise ConfigError(f"generated is for attention='causal', as the model generates, not for {self.attention}")
        others = [
            name
            for name in ("layers", "exit_layer", "states", "prepend", "reroute")
            if getattr(self, name) != METHODS[name]
        ]
        if others or self.append_eos:
            raise ConfigError(f"generated and {' and '.join(others) or 'append_eos'} do not go together")

    @property
    def poolings(self) -> int:
        """How many vectors are concatenated."""
        return self.pooling.count(CONCATENATED) + 1

    @property
    def follows_sentence_transformers(self) -> bool:
        """Whether sentence-transformers' conventions hold."""
        return self.conventions == ST_CONVENTIONS

    @property
    def templates(self) -> tuple[Template, ...]:
        """Templates to put around a text, each in its own pass."""
        return templates_of(self.template)

    @property
    def normalizes_texts(self) -> bool:
        """Whether texts are encoded in their normal form."""
        return self.text_normalization == "nfkc"

    @property
    def methods(self) -> list[str]:
        """The settings of methods without training that are not at their default."""
        return [name for name, usual in METHODS.items() if getattr(self, name) != usual]

    @property
    def reads_beside(self) -> bool:
        """Whether a pass does more than its plan: reads other states than the last hidden ones, or changes some."""
        usual = (LAST_LAYER, HIDDEN, 0, 0, NO_REROUTE)
        return (self.layers, self.states, self.generated, self.prepend, self.reroute) != usual

    def refuse_methods(self, what: str, takes: Sequence[str] = ()) -> None:
        """Refuse methods that training and exports don't support, but for those that it ``takes``."""
        names = [name for name in self.methods if name not in ("pool_bos", "text_normalization", *takes)]
        names += ["prompt with a place for the text"] * any(map(is_template, (self.prompt, *self.prompts.values())))
        if names:
            raise ConfigError(f"{what} takes no {' and no '.join(names)}")

    def depth(self, n_layers: int) -> int:
        """Return how many layers of a model of ``n_layers`` read a text.

        Raises:
            ConfigError: ``exit_layer`` is more than the model has.

        >>> EncoderConfig().depth(30), EncoderConfig(exit_layer=20).depth(30)
        (30, 20)
        """
        if self.exit_layer is not None and self.exit_layer > n_layers:
            raise ConfigError(f"exit_layer={self.exit_layer}: the model has {n_layers} layers")
        return self.exit_layer or n_layers

    def with_defaults(self, n_layers: int) -> "EncoderConfig":
        """Return the same config with the plan's k (and k0) worked out for a model of ``n_layers`` layers."""
        return replace(self, attention=self.attention.with_defaults(self.depth(n_layers)))

    def resolved(self, n_layers: int) -> ResolvedPlan:
        """Return what the plan means in the layers of a model of ``n_layers`` layers that read a text.

        Raises:
            ConfigError: a setting names a layer that these do not have.
        """
        depth = self.depth(n_layers)
        if self.states != HIDDEN and 0 in layer_numbers(self.layers, depth):
            raise ConfigError(f"layers={self.layers}: 0 are the embeddings, which have no {self.states}")
        layer_numbers(self.layers, depth)
        rerouted_layers(self.reroute, depth)
        if self.prepend > depth:
            raise ConfigError(f"prepend={self.prepend}: the model has {depth} layers")
        return self.attention.resolve(depth)

    def plan_label(self, n_layers: int) -> str:
        """Return what tables call the plan for a model of ``n_layers`` layers."""
        return self.attention.label(self.depth(n_layers))

    def prompt_text(self, prompt: str | None = None, prompt_name: str | None = None) -> str:
        """Return the prompt to use: the text given, that of a name from ``prompts``, or the default.

        Raises:
            ConfigError: as ``choose_prompt``.

        >>> EncoderConfig(prompts={"query": "Question: "}).prompt_text(prompt_name="query")
        'Question: '
        """
        if prompt is None and prompt_name is None:
            return self.prompt
        return choose_prompt(self.prompts, prompt, prompt_name)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-ready dict."""
        unused = METHODS.keys() - set(self.methods) | {name for name in RANKING if getattr(self, name) is None}
        unused |= {name for name, usual in READING.items() if getattr(self, name) == usual}
        written = {name: value for name, value in asdict(self).items() if name not in unused}
        return {**written, "attention": self.attention.to_dict(), "prompts": dict(self.prompts)}


FREE = ("prompt", "prompts", "normalize", "max_length", *RANKING, "similarity", "transform", "text_normalization")
"""Settings that may differ from those of a trained encoder without spoiling what it reads."""


def read_alike(first: EncoderConfig, second: EncoderConfig) -> bool:
    """Whether two encoder configs read a text alike, up to prompts, lengths and what is done with its vector."""
    return replace(first, **{name: getattr(second, name) for name in FREE}) == second


_READ_OF_A_PASS = (
    "layers",
    "states",
    "pooling",
    "pool_prompt",
    "pool_bos",
    "transform",
    "normalize",
    "similarity",
    *RANKING,
)


def same_pass(first: EncoderConfig, second: EncoderConfig) -> bool:
    """Whether two encoder configs run a model alike, and differ at most in what they read of the pass and do with it.

    >>> plan = AttentionPlan("causal")
    >>> same_pass(EncoderConfig(plan), EncoderConfig(plan, layers="all", pooling="last", transform="whitening"))
    True
    >>> same_pass(EncoderConfig(plan), EncoderConfig(plan, template="topic"))
    False
    """
    names = {field.name for field in fields(EncoderConfig)} - set(_READ_OF_A_PASS)
    return all(getattr(first, name) == getattr(second, name) for name in names)


def vectors_alike(first: EncoderConfig, second: EncoderConfig) -> bool:
    """Whether two encoder configs differ in nothing that a fitted transform depends on."""
    same = ("normalize", "max_length", *RANKING, "similarity")
    return replace(first, **{name: getattr(second, name) for name in same}) == second


def read_settings(path: Path, entry: str) -> dict[str, Any]:
    """Read a JSON file of settings, such as ``gerund.json``, which has an object as its ``entry``."""
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get(entry), dict):
        raise DataError(f"{path} has no {entry!r} entry")
    if data.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {data.get('format')!r}; this version of gerund reads format {FORMAT}")
    return data


LATE_FILE = "late.json"
TokenPrecision = Literal["float32", "float16", "int8"]
CountedTokens = Literal["text", "all"]
TOKEN_PRECISIONS: tuple[TokenPrecision, ...] = get_args(TokenPrecision)


@dataclass(frozen=True)
class LateConfig:
    """How queries and documents are read for their token vectors.

    >>> LateConfig(layers="nowhere")
    Traceback (most recent call last):
    gerund.errors.ConfigError: layers='nowhere' is none of last, all, 6, -2, 4-8 and 1+8
    """

    query: str = "Query: "  # put before every query

    document: str = "Document: "  # put before every document

    layers: str = LAST_LAYER  # whose states are the token vectors, spelled as the encoder's setting

    # ``text``: the text's own tokens have vectors. ``all``: so have its marker's and the special ones, as in
    # sentence-transformers.
    counts: CountedTokens = "text"

    skipped: tuple[str, ...] = ()  # tokens of documents that have no vectors, such as punctuation

    query_length: int | None = None  # longest query in tokens, everything included; None for the model's own limit

    document_length: int | None = None  # longest document

    def __post_init__(self) -> None:
        for name in ("query", "document", "layers"):
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{LATE_FILE}: {name} is a text, not {getattr(self, name)!r}")
        check_layers(self.layers)
        one_of(f"counts in {LATE_FILE}", self.counts, get_args(CountedTokens))
        if any(not isinstance(token, str) for token in self.skipped):
            raise ConfigError(f"{LATE_FILE}: skipped is a list of tokens, not {self.skipped!r}")
        for name in ("query_length", "document_length"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{LATE_FILE}: {name} is a whole number above 0, not {value!r}")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``late.json``, without defaults of settings that were added later."""
        usual = {item.name: item.default for item in fields(self)}
        added = ("counts", "skipped", "query_length", "document_length")
        return {key: value for key, value in asdict(self).items() if key not in added or value != usual[key]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "LateConfig":
        """Read settings back; raises ``ConfigError`` for an unknown field."""
        demand_fields(cls, data, f"in {LATE_FILE}")
        listed = data.get("skipped", ())
        if not isinstance(listed, list | tuple):
            raise ConfigError(f"{LATE_FILE}: skipped is a list of tokens, not {listed!r}")
        return cls(**{**data, "skipped": tuple(listed)})


def check_multi(precision: str, pool_factor: int) -> None:
    """Refuse an unknown precision of token vectors, or a pooling of less than one token."""
    one_of("precision of token vectors", precision, TOKEN_PRECISIONS)
    if whole_number("pool_factor", pool_factor) < 1:
        raise ConfigError(f"pool_factor must be at least 1, got {pool_factor}")


ANSWERS_FILE = "answers.json"
AnswerPrefix = Literal["vector", "states"]


@dataclass(frozen=True)
class AnswerConfig:
    """How many answer tokens stand behind a text, and how they are read as text.

    >>> AnswerConfig(tokens=5)
    Traceback (most recent call last):
    gerund.errors.ConfigError: answers.json: read is 10 and tokens 5: both are whole numbers, 1 <= read <= tokens
    """

    tokens: int = 20  # behind a text

    read: int = 10  # the last ones, whose states are pooled

    prefix: AnswerPrefix = "vector"  # what is mapped to the embeddings that the model reads to write the answer

    before: tuple[int, ...] = ()  # ids that stand before these, as before every text (BOS)

    def __post_init__(self) -> None:
        counts = (self.read, self.tokens)
        if any(type(count) is not int for count in counts) or not 1 <= self.read <= self.tokens:
            raise ConfigError(
                f"{ANSWERS_FILE}: read is {self.read} and tokens {self.tokens}: both are whole numbers, "
                "1 <= read <= tokens"
            )
        one_of(f"prefix in {ANSWERS_FILE}", self.prefix, get_args(AnswerPrefix))
        if any(type(number) is not int or number < 0 for number in self.before):
            raise ConfigError(f"{ANSWERS_FILE}: before is a list of token ids, not {list(self.before)}")

    def to_dict(self) -> dict[str, Any]:
        """Return the content of ``answers.json``."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read settings back; raises ``ConfigError`` for an unknown field."""
        demand_fields(cls, data, f"in {ANSWERS_FILE}")
        before = data.get("before", ())
        if not isinstance(before, list | tuple):
            raise ConfigError(f"{ANSWERS_FILE}: before is a list of token ids, not {before!r}")
        return cls(**{**data, "before": tuple(before)})


def answers_folder(adapter: str | Path | None) -> Path | None:
    """Return the folder of answer tokens that an adapter is; None for another adapter, or none."""
    if adapter in (None, NO_ADAPTER, AUTO_ADAPTER):
        return None
    folder = Path(str(adapter))
    return folder if (folder / ANSWERS_FILE).is_file() else None
