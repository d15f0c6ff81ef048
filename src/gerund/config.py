"""Settings: how a model is read as an encoder, and how it samples.

Knows: names, ranges, JSON. Does not know: torch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypedDict, get_args

from gerund.attention.plan import AttentionPlan
from gerund.checks import demand_between, demand_number, demand_unicode, flag, one_of, read_json, whole_number
from gerund.encoder_methods import (
    LAST_LAYER,
    NO_REROUTE,
    NO_TEMPLATE,
    NO_TRANSFORM,
    Template,
    check_layers,
    check_reroute,
    choose_prompt,
    is_template,
    templates_around,
    templates_of,
    transform_parts,
)
from gerund.errors import ConfigError, DataError, unknown_name
from gerund.poolings import CONCATENATED, canonical_pooling, pooling_parts
from gerund.types import Scorer

CONFIG_FILE = "gerund.json"
DEFAULT_MODEL = "default"
"""Means the bundled model wherever a model is named; a folder of that name is ``./default``."""
FORMAT = 1
MOST_AT_ONCE = 10_000
"""Texts that are written for one at a time; more are a slip."""
ExportFormat = Literal["sentence-transformers", "merged", "onnx", "onnx-int8", "openvino", "gguf", "gguf-q8_0"]
EXPORT_FORMATS: tuple[ExportFormat, ...] = get_args(ExportFormat)
InfillMethod = Literal["infill", "left-only", "blank", "contextual", "prefix-suffix", "line-by-line"]
INFILL_METHODS: tuple[InfillMethod, ...] = get_args(InfillMethod)
DTYPE_NAMES = ("auto", "float32", "bfloat16", "float16", "int8")
POOL_BOS = ("auto", "always", "never")
TEXT_NORMALIZATIONS = ("nfkc", "none")

Job = Literal["encode", "infill", "score"]
"""What a model does with an adapter active; it generates with none."""
JOBS: tuple[Job, ...] = get_args(Job)

ST_CONVENTIONS = "sentence-transformers"
CONVENTIONS = ("gerund", ST_CONVENTIONS)
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")

_TEXT, _FLAG, _NUMBER, _FRACTION, _NOTHING = str, bool, int, float, type(None)
_WORDS = {
    _TEXT: "a text",
    _FLAG: "true or false",
    _NUMBER: "a whole number",
    _FRACTION: "a number from 0 to 1",
    _NOTHING: "nothing",
}
_KINDS: dict[str, tuple[type, ...]] = {
    "pooling": (_TEXT,),
    "prompt": (_TEXT,),
    "pool_prompt": (_FLAG,),
    "append_eos": (_FLAG,),
    "normalize": (_FLAG,),
    "max_length": (_NUMBER, _NOTHING),
    "template": (_TEXT,),
    "layers": (_TEXT,),
    "prepend": (_NUMBER,),
    "reroute": (_TEXT,),
    "transform": (_TEXT,),
    "pool_bos": (_TEXT,),
    "text_normalization": (_TEXT,),
    "fusion": (_FRACTION, _NOTHING),
    "conventions": (_TEXT,),
    "similarity": (_TEXT,),
}
METHODS = {
    "template": NO_TEMPLATE,
    "layers": LAST_LAYER,
    "prepend": 0,
    "reroute": NO_REROUTE,
    "transform": NO_TRANSFORM,
    "pool_bos": "auto",
    "text_normalization": "nfkc",
}
"""Settings that came later than the others, by what they are where nothing is said. As such they are neither written
nor hashed, so that fingerprints stay what they were."""
READING = {"conventions": "gerund", "similarity": "cosine"}
"""Likewise, of settings that a ready-made encoder brings along and that are no methods."""


@dataclass(frozen=True)
class EncoderConfig:
    """How a language model is read as an encoder."""

    attention: AttentionPlan = field(default_factory=AttentionPlan)
    """Which layers look where."""

    pooling: str = "mean"
    """How token states become one vector: mean, weighted-mean (later count more), last, first, last-mean (of both),
    max, mean-sqrt; of several, such as ``first+mean``, the vectors are concatenated."""

    prompt: str = ""
    """Text put before every text unless another prompt is given; with ``{text}``, around it, as its template."""

    prompts: Mapping[str, str] = field(default_factory=dict)
    """Prompts by name, such as ``query`` and ``document``."""

    pool_prompt: bool = False
    """Whether the prompt's tokens (and the beginning-of-text token before them) are pooled as well."""

    append_eos: bool = False
    """Whether an end token is put after every text; ``last`` pooling then reads its state."""

    normalize: bool = True
    """Whether vectors have length 1 unless the call says otherwise."""

    max_length: int | None = None
    """Longest text in tokens, prompt and special tokens included; None for what the model was made for."""

    template: str = NO_TEMPLATE
    """What is put around a text: a name (``prompteol``, ``metaeol``, ...) or a text with ``{text}``; ``none``."""

    layers: str = LAST_LAYER
    """Whose states are averaged before pooling: ``last``, ``all``, ``6``, ``-2`` (from the end), ``4-8`` or ``1+8``."""

    prepend: int = 0
    """Token Prepending: below which layer the last token's state takes the place of a token before the text; 0 for
    none."""

    reroute: str = NO_REROUTE
    """KV-Embedding: the layers in which the last token's key and value stand before the text, for all tokens to see:
    ``all``, ``6``, ``4-8`` or ``1+8``; ``none``."""

    transform: str = NO_TRANSFORM
    """What is done to pooled vectors, fitted on a sample of texts: ``whitening`` or ``all-but-the-top``, with a number
    behind it for the dimensions kept or the directions taken out; ``none``. ``truncate-128`` keeps the first 128
    numbers and is fitted to nothing."""

    pool_bos: str = "auto"
    """Whether the special tokens before a text without a prompt are pooled: ``always`` (as in LBW's released
    evaluation), ``never`` (as in its contrastive training), or ``auto``: unless the plan hides them."""

    text_normalization: str = "nfkc"
    """What is done to a text before it is encoded: ``nfkc`` gives texts that read the same the same vector (NFKC, no
    invisible characters, no hyphens at line ends); ``none`` leaves every text as it is. Plain ASCII is the same in
    both, but for words that are divided at a line's end. Prompts and what is generated from are never changed."""

    fusion: float | None = None
    """What the vectors count where a search joins them with words, from 0 to 1; None where nobody has tuned it. No
    vector depends on it."""

    conventions: str = "gerund"
    """Whose conventions hold where libraries differ: ``gerund``, or ``sentence-transformers`` for a ready-made encoder.
    There control tokens in a prompt are parsed, the prompt is as long as it is alone, its tokens count in the weights
    of a weighted mean, and ``max_length`` may be above the tokenizer's own limit."""

    similarity: str = "cosine"
    """How ``similarity`` compares vectors: ``cosine``, ``dot``, ``euclidean`` or ``manhattan`` (both negative, so that
    more is nearer). No vector depends on it."""

    def __post_init__(self) -> None:
        if type(self.fusion) is int:
            object.__setattr__(self, "fusion", float(self.fusion))
        if not isinstance(self.attention, AttentionPlan):
            raise ConfigError(f"attention is an AttentionPlan, not {self.attention!r}")
        for name, kinds in _KINDS.items():
            if type(getattr(self, name)) not in kinds:
                wanted = " or ".join(_WORDS[kind] for kind in kinds)
                raise ConfigError(f"{name} is {wanted}, not {getattr(self, name)!r}")
        named = self.prompts.items() if isinstance(self.prompts, Mapping) else [(None, None)]
        if any(type(name) is not str or type(text) is not str for name, text in named):
            raise ConfigError(f"prompts are texts by name, not {self.prompts!r}")
        for name, text in [("prompt", self.prompt), *((f"the prompt {name!r}", text) for name, text in named)]:
            demand_unicode(name, text)
        object.__setattr__(self, "pooling", canonical_pooling(self.pooling))
        pooling_parts(self.pooling)
        if self.max_length is not None and self.max_length < 1:
            raise ConfigError(f"max_length={self.max_length} leaves no room for a text")
        if self.fusion is not None and not 0 <= self.fusion <= 1:
            raise ConfigError(f"fusion={self.fusion} is not a number from 0 (words alone) to 1 (vectors alone)")
        self._check_methods()

    def _check_methods(self) -> None:
        demand_unicode("the template", self.template)
        one_of("conventions", self.conventions, CONVENTIONS)
        one_of("similarity", self.similarity, SIMILARITIES)
        check_layers(self.layers)
        check_reroute(self.reroute)
        if self.transform != NO_TRANSFORM:
            transform_parts(self.transform)
        if self.pool_bos not in POOL_BOS:
            raise unknown_name("value of pool_bos", self.pool_bos, POOL_BOS)
        if self.text_normalization not in TEXT_NORMALIZATIONS:
            raise unknown_name("text_normalization", self.text_normalization, TEXT_NORMALIZATIONS)
        for text in (self.prompt, *self.prompts.values()):
            templates_around(text, self.templates, self.attention.name)
        if self.prepend < 0 or self.prepend == 1:
            raise ConfigError(f"prepend={self.prepend}: the first layer that can take a state over is the second one")
        if self.prepend and not self.templates:
            raise ConfigError("prepend puts a token into a template, such as template='prompteol'; give one")
        once = self.attention.takes_skips and not self.attention.skips
        for name, used in (("prepend", self.prepend), ("reroute", self.reroute != NO_REROUTE)):
            if used and self.attention.skips:
                raise ConfigError(f"{name} and skips do not go together")
            if used and not once:
                raise ConfigError(f"{name} is for plans that run each layer once, not for {self.attention.name!r}")

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
        """What is put around a text, each in a pass of its own."""
        return templates_of(self.template)

    @property
    def normalizes_texts(self) -> bool:
        """Whether texts are encoded in their normal form."""
        return self.text_normalization == "nfkc"

    @property
    def methods(self) -> list[str]:
        """The settings of methods without training that are not left as they usually are."""
        return [name for name, usual in METHODS.items() if getattr(self, name) != usual]

    @property
    def reads_beside(self) -> bool:
        """Whether a pass does more than its plan: mixes layers, prepends or reroutes."""
        return self.layers != LAST_LAYER or bool(self.prepend) or self.reroute != NO_REROUTE

    def refuse_methods(self, what: str) -> None:
        """Refuse what training and exports do not know of.

        Raises:
            ConfigError: a template, mixed layers, prepending, rerouting or a transform is set.
        """
        found = [name for name in self.methods if name not in ("pool_bos", "text_normalization")]
        found += ["prompt with a place for the text"] * any(map(is_template, (self.prompt, *self.prompts.values())))
        if found:
            raise ConfigError(f"{what} takes no {' and no '.join(found)}")

    def with_defaults(self, n_layers: int) -> "EncoderConfig":
        """Return the same config with the plan's k (and k0) worked out for ``n_layers`` layers."""
        return replace(self, attention=self.attention.with_defaults(n_layers))

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
        unused = METHODS.keys() - set(self.methods) | ({"fusion"} if self.fusion is None else set())
        unused |= {name for name, usual in READING.items() if getattr(self, name) == usual}
        written = {name: value for name, value in asdict(self).items() if name not in unused}
        return {**written, "attention": self.attention.to_dict(), "prompts": dict(self.prompts)}


def vectors_alike(one: EncoderConfig, other: EncoderConfig) -> bool:
    """Whether two encoder configs differ in nothing that a fitted transform depends on."""
    same = ("normalize", "max_length", "fusion", "similarity")
    return replace(one, **{name: getattr(other, name) for name in same}) == other


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. All limits apply together, in the order given here.

    >>> Sampling(temperature=0.7, top_p=0.9, seed=1).is_greedy
    False
    """

    temperature: float = 0.0
    """0 takes the most probable token each time (greedy); 1 samples from the model as it is."""

    top_k: int | None = None
    """Only the k most probable tokens."""

    top_p: float | None = None
    """Nucleus sampling: only the most probable tokens that together have this probability."""

    min_p: float | None = field(default=None, kw_only=True)
    """Only tokens that are at least this fraction as probable as the most probable one (Nguyen et al. 2024)."""

    typical_p: float | None = None
    """Locally typical sampling: only tokens of about average surprise that together have this probability."""

    seed: int | Sequence[int] | None = None
    """Makes sampling repeatable. Each prompt samples with the seed alone, whatever is beside it, so equal prompts get
    equal texts; a sequence gives every prompt a seed of its own. None takes a fresh seed for each prompt."""

    repetition_penalty: float = field(default=1.0, kw_only=True)
    """Above 1, tokens of the prompt and of the text so far become less probable: their logits are divided by it, or
    multiplied where they are negative (Keskar et al. 2019). This and the next three come first, for greedy too."""

    frequency_penalty: float = field(default=0.0, kw_only=True)
    """Taken off a token's logit for each time that the text so far (not the prompt) has it; -2 to 2."""

    presence_penalty: float = field(default=0.0, kw_only=True)
    """Taken off a token's logit once where the text so far (not the prompt) has it; -2 to 2."""

    logit_bias: Mapping[int, float] = field(default_factory=dict, kw_only=True, hash=False)
    """Added to the logits of tokens, by token id; -100 to 100, where -100 all but bans a token."""

    def __post_init__(self) -> None:
        demand_number("temperature", self.temperature)
        # numpy's whole numbers overflow where Python's do not, and transformers refuses them.
        if self.top_k is not None:
            object.__setattr__(self, "top_k", whole_number("top_k", self.top_k))
        if self.seed is not None:
            # An array without dimensions has __iter__ and no elements.
            listed = hasattr(self.seed, "__iter__") and getattr(self.seed, "ndim", 1) == 1
            listed = listed and not isinstance(self.seed, (str, bytes, Mapping))
            seeds = tuple(whole_number("a seed", one) for one in self.seed) if listed else None  # type: ignore[union-attr]
            object.__setattr__(self, "seed", whole_number("seed", self.seed) if seeds is None else seeds)
        if not math.isfinite(self.temperature):
            raise ConfigError(
                f"temperature={self.temperature} is not a finite number; 0 is greedy, 1 the model as it is"
            )
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature} is negative; 0 is greedy, 1 the model as it is")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k} leaves no token to choose from")
        for name in ("top_p", "typical_p"):
            value = getattr(self, name)
            if value is None:
                continue
            demand_number(name, value)
            if not 0 < value <= 1:
                raise ConfigError(f"{name}={value} is not above 0 and at most 1")
        self._check_penalties()

    def _check_penalties(self) -> None:
        demand_between("min_p", 0.0 if self.min_p is None else self.min_p, 0, 1)
        demand_between("repetition_penalty", self.repetition_penalty, 0.1, 10)
        demand_between("frequency_penalty", self.frequency_penalty, -2, 2)
        demand_between("presence_penalty", self.presence_penalty, -2, 2)
        if not isinstance(self.logit_bias, Mapping):
            raise ConfigError(f"logit_bias is a number by token id, such as {{42: -100}}, not {self.logit_bias!r}")
        for token, bias in self.logit_bias.items():
            if whole_number("a token id of logit_bias", token) < 0:
                raise ConfigError(f"logit_bias names the token {token}, and token ids begin at 0")
            demand_between(f"logit_bias of the token {token}", bias, -100, 100)
        own = {int(token): float(bias) for token, bias in self.logit_bias.items() if bias}
        object.__setattr__(self, "logit_bias", own)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether what was written so far, or a bias, changes what is probable."""
        usual = (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) == (1, 0, 0)
        return not usual or bool(self.logit_bias)


GREEDY = Sampling()
"""The default sampling: the likeliest token each time."""


@dataclass(frozen=True)
class Rerank:
    """Write several continuations and keep those that a scorer likes best (RankGen, section 2.3).

    ``Rerank(samples=20)`` writes twenty whole continuations and takes the best. ``Rerank(samples=10, beams=2,
    every=20)`` is the paper's beam search: after every 20 tokens the two best of twenty are kept and written on.

    >>> Rerank(samples=10, beams=2, every=20).width
    20
    """

    samples: int = 20
    """Continuations sampled from each beam; in the first round ``beams`` times as many from the prompt."""

    beams: int = 1
    """Continuations that are kept each time."""

    every: int | None = None
    """Tokens between two rankings; None ranks only what is finished."""

    scorer: "str | Scorer | None" = None
    """Who ranks: a name, a scorer's folder, or an object with a ``score`` method. None takes the model's own scorer
    where it was trained to be one, else ``pmi``."""

    def __post_init__(self) -> None:
        for name, what in (("samples", "continuation"), ("beams", "continuation"), ("every", "token")):
            value = getattr(self, name)
            if value is None and name == "every":
                continue
            if whole_number(name, value) < 1:
                raise ConfigError(f"{name}={value} leaves no {what}")
        if self.width > MOST_AT_ONCE:
            raise ConfigError(f"{self.width} continuations at a time are more than {MOST_AT_ONCE}, the most")

    @property
    def width(self) -> int:
        """How many continuations of one prompt are written at a time."""
        return self.samples * self.beams


def sampling_or(given: Sampling | None, default: Sampling = GREEDY) -> Sampling:
    """Return how tokens are chosen: as given, or by default (greedily) where nothing is said.

    Raises:
        ConfigError: what is given is no ``Sampling``.
    """
    if given is None:
        return default
    if not isinstance(given, Sampling):
        raise ConfigError(f"sampling is a Sampling, such as Sampling(temperature=0.8), not {given!r}")
    return given


class SamplingKeywords(TypedDict, total=False):
    """The fields of ``Sampling`` as keywords of ``generate`` and its like, in the place of ``sampling``."""

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    typical_p: float | None
    seed: int | Sequence[int] | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    do_sample: bool | None
    """Whether to sample at all, as in transformers: False is greedy, True samples with temperature 1 unless another is
    given."""


_FILTERS = ("top_k", "top_p", "min_p", "typical_p")


def sampling_from(given: Sampling | None, keywords: Mapping[str, Any], default: Sampling = GREEDY) -> Sampling:
    """Return how tokens are chosen: as ``given``, or as the default with the keywords put in.

    A filter (``top_k``, ``top_p``, ``min_p``, ``typical_p``) without a temperature samples with temperature 1.

    Args:
        given: a whole ``Sampling``, which leaves nothing to the keywords.
        keywords: those of ``SamplingKeywords``; others are passed over, and None is left out.
        default: what holds where nothing is said.

    Raises:
        ConfigError: both are given, or the keywords contradict each other.

    >>> sampling_from(None, {"top_p": 0.9, "seed": 1}) == Sampling(temperature=1.0, top_p=0.9, seed=1)
    True
    """
    said = {name: keywords[name] for name in SamplingKeywords.__annotations__ if keywords.get(name) is not None}
    if not said or given is not None:
        if said:
            raise ConfigError(f"`{next(iter(said))}` is a part of `sampling`; pass one of them, not both")
        return sampling_or(given, default)
    samples = said.pop("do_sample", None)
    if samples is not None and not flag("do_sample", samples):
        unused = next((name for name in ("temperature", *_FILTERS) if said.get(name)), None)
        if unused is not None:
            raise ConfigError(f"do_sample=False takes the most probable tokens, so `{unused}` has no use; remove it")
        return replace(default, **{**dict.fromkeys(_FILTERS), "temperature": 0.0, **said})
    if samples is not None and said.get("temperature") == 0:
        raise ConfigError("do_sample=True contradicts temperature=0, which is greedy; remove one of them")
    if "temperature" not in said and default.is_greedy and (samples or any(name in said for name in _FILTERS)):
        said["temperature"] = 1.0
    return replace(default, **said)


def read_settings(path: Path, entry: str) -> dict[str, Any]:
    """Read a JSON file of settings, such as ``gerund.json``.

    Args:
        path: the file.
        entry: what it has to hold: an object.

    Raises:
        DataError: the file cannot be read, is not valid JSON, or has no such entry.
        ConfigError: it was written by a newer version.
    """
    data = read_json(path)
    if not isinstance(data, dict) or not isinstance(data.get(entry), dict):
        raise DataError(f"{path} has no {entry!r} entry")
    if data.get("format") != FORMAT:
        raise ConfigError(f"{path} has format {data.get('format')!r}; this version of gerund reads format {FORMAT}")
    return data
