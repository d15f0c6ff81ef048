"""Settings: how a model is read as an encoder, and how it samples.

Knows: names, ranges, JSON. Does not know: torch.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from gerund.checks import demand_unicode, one_of, read_json
from gerund.errors import ConfigError, DataError, unknown_name
from gerund.poolings import CONCATENATED, canonical_pooling, pooling_parts
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import (
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

CONFIG_FILE = "gerund.json"
DEFAULT_MODEL = "default"
"""Means the bundled model wherever a model is named; a folder of that name is ``./default``."""
FORMAT = 1
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
