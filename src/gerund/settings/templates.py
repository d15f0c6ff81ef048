"""Parse encoder options: prompts, templates, layer mixing and transforms.

Sources of the templates: PromptEOL (Jiang et al., 2023, "Scaling Sentence Embeddings with Large Language Models") with
its in-context form; pretended chain of thought and knowledge enhancement (Zhang et al., 2024, "Simple Techniques for
Enhancing Sentence Embeddings in Generative Language Models"); MetaEOL (Lei et al., 2024, "Meta-Task Prompting Elicits
Embeddings from Large Language Models"). The texts are those of their released code. Those of KV-Embedding (Tang and
Yang, 2026, arXiv 2601.01046), which has none, are as others wrote them down; that of echo embeddings (Springer et al.,
2024, "Repetition Improves Language Model Embeddings") is the paper's, of its experiments without training.

Knows: names, numbers, texts around texts. Does not know: tokens, tensors, models.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gerund.errors import ConfigError, unknown_name

NO_TEMPLATE = "none"
PLACE = "{text}"
"""Stands for the text in a template of one's own."""
NAMED_POOLING = "last"
"""How most named templates are pooled: the last token's state is the vector."""
ECHO = "echo"
"""The plan of echo embeddings, which reads a text twice."""
REWRITE = "rewrite"
"""The template of echo embeddings, which has the text twice."""
TOPIC = "topic"
"""A wording of gerund's own for PromptEOL's idea, chosen on real models."""
KV_EMBEDDING = "kv-embedding"
"""The template of KV-Embedding, which pools the last token's state and the mean of all tokens alike."""

_EOL = 'his sentence : "{text}" means in one word:"'
_META = {
    "you're presented with a text excerpt. Your task is to categorize the excerpt into a broad category such as "
    "'Education', 'Technology', 'Health', 'Business', 'Environment', 'Politics', or 'Culture'. These categories help "
    "in organizing content for better accessibility and targeting. For": "should be classified under one general "
    "category",
    "you're given a statement and you need to determine whether it's presenting an 'Opinion' or a 'Fact'. This "
    "distinction is vital for information verification, educational purposes, and content analysis. "
    "For": "discriminates between opinion and fact",
    "you're given a review from an online platform. Your task is to generate a rating for the product based on the "
    "review on a scale of 1-5, where 1 means 'extremely negative' and 5 means 'extremely positive'. "
    "For": "reflects the sentiment",
    "you're reading a personal diary entry. Your task is to identify the predominant emotion expressed, such as joy, "
    "sadness, anger, fear, or love. For": "conveys the emotion",
    "you're presented with two sentences. Your task is to assess whether the sentences convey the same meaning. Use "
    "'identical', 'similar', 'different', or 'unrelated' to describe the relationship. To enhance the performance "
    "of": "means",
    "you're given a sentence and a phrase. Your task is to determine if the phrase can be a contextual synonym within "
    "the given sentence. Options include 'yes', 'no', or 'partially'. To enhance the performance of": "means",
    "you're examining a news article. Your task is to extract the most critical fact from the article. "
    "For": "encapsulates the key fact",
    "you're reviewing a scientific abstract. Your task is to identify the main entities (e.g., proteins, diseases) and "
    "their relations (e.g., causes, treats). For": "highlights the primary entity or relation",
}

NAMED: dict[str, tuple[str, ...]] = {
    "prompteol": (f"T{_EOL}",),
    # The demonstration of the released code's front page; it has another one for each size of OPT.
    "prompteol-few-shot": (f'This sentence : "A jockey riding a horse." means in one word:"Equestrian".T{_EOL}',),
    "prompteol-cot": (f"After thinking step by step , t{_EOL}",),
    "prompteol-knowledge": (
        "The essence of a sentence is often captured by its main subjects and actions, while descriptive terms provide "
        f"additional but less central details. With this in mind , t{_EOL}",
    ),
    "metaeol": tuple(
        f'In this task, {task} this task, this sentence : "{PLACE}" {verb} in one word:"'
        for task, verb in _META.items()
    ),
    TOPIC: (f'Text: {PLACE}\nThe topic of this text in one word: "',),
    KV_EMBEDDING: (f"Context: {PLACE} Compress the Context in one word:",),
    REWRITE: (f"Rewrite the sentence: {PLACE}, rewritten sentence: {PLACE}",),
}
"""Templates by name; of a name with several the mean of their vectors is taken."""

# Templates whose released code reads the output of the second last layer.
_SECOND_LAST = ("prompteol-cot", "prompteol-knowledge")
# Templates that take a text as it is.
_AS_IT_IS = (TOPIC, KV_EMBEDDING, REWRITE)
_KV_QUERY = f"Query: {PLACE} Compress the Query in one word:"

LAST_LAYER = "last"
ALL_LAYERS = "all"
HIDDEN = "hidden"
"""The states that are read unless the encoder settings say otherwise: hidden states."""
NO_REROUTE = "none"
_FROM_THE_END = re.compile(r"-[1-9][0-9]{0,5}")
_LAYERS = re.compile(r"[0-9]{1,6}(-[0-9]{1,6})?(\+[0-9]{1,6}(-[0-9]{1,6})?)*")

NO_TRANSFORM = "none"
WHITENING = "whitening"
ALL_BUT_THE_TOP = "all-but-the-top"
STANDARDIZATION = "standardization"
TRUNCATE = "truncate"
_TRANSFORM = re.compile(rf"({WHITENING}|{ALL_BUT_THE_TOP}|{STANDARDIZATION}|{TRUNCATE})(?:-([0-9]{{1,6}}))?")


@dataclass(frozen=True)
class Template:
    """What is put before and after a text."""

    before: str
    after: str
    ends_sentences: bool = False
    """Make the text a sentence first, as the released code does: it gets a full stop if it ends in none of ``. ? " '``,
    or instead of a question mark, and its double quotation marks become single ones."""
    between: str | None = None  # what is put between the text and its copy; None if the text occurs once

    def sentence(self, text: str) -> str:
        """Return the text as it stands in the template.

        >>> Template("", "", True).sentence('Is it "so"?'), Template("", "", True).sentence("A dog")
        ("Is it 'so'.", 'A dog.')
        """
        if not self.ends_sentences or not text:
            return text
        ended = text if text[-1] in ".?\"'" else f"{text}."
        quoted = ended.replace('"', "'")
        return f"{quoted[:-1]}." if quoted[-1] == "?" else quoted


NO_FRAME = Template("", "")


def parted(text: str, *, ends_sentences: bool = False) -> Template:
    """Return the template that a text with ``{text}``, once or twice, means.

    >>> parted("Query: {text}!"), parted("{text} = {text}").between
    (Template(before='Query: ', after='!', ends_sentences=False, between=None), ' = ')
    """
    before, *between, after = text.split(PLACE)
    if len(between) > 1:
        raise ConfigError(f"the template {text!r} has {PLACE} more than twice")
    return Template(before, after, ends_sentences, between[0] if between else None)


def is_template(text: str) -> bool:
    """Whether a text has a place for another, so that a prompt stands around a text and not before it."""
    return PLACE in text


def templates_around(prompt: str, templates: Sequence[Template], plan: str) -> tuple[tuple[Template, ...], str]:
    """Return the templates that texts are read in under a prompt, and what of it stands before those.

    >>> templates_around("Q: {text}?", (), "causal")[0][0].after, templates_around("Q: ", (), "causal")[1]
    ('?', 'Q: ')
    """
    used = (parted(prompt),) if is_template(prompt) else tuple(templates)
    twice = [template.between is not None for template in used]
    if plan == ECHO and not all(twice):
        raise ConfigError(f"the plan 'echo' reads the text twice: its templates have {PLACE} twice, as 'rewrite' has")
    if plan != ECHO and any(twice):
        raise ConfigError(f"a template with {PLACE} twice is for attention='echo'")
    return used or (NO_FRAME,), "" if is_template(prompt) else prompt


def templates_of(name: str) -> tuple[Template, ...]:
    """Return the templates that a name or a text with ``{text}`` means; none for ``none``.

    >>> [len(templates_of(name)) for name in ("none", "prompteol", "metaeol", "Query: {text}!")]
    [0, 1, 8, 1]
    """
    if name == NO_TEMPLATE:
        return ()
    if name in NAMED:
        return tuple(parted(text, ends_sentences=name not in _AS_IT_IS) for text in NAMED[name])
    if is_template(name):
        return (parted(name),)
    raise unknown_name("template", name, [NO_TEMPLATE, *NAMED, f"a text with {PLACE}"])


def settings_of_template(name: str) -> dict[str, Any]:
    """Return the settings that a template sets unless others are given; its prompts are added to others by name.

    >>> settings_of_template("prompteol-cot"), settings_of_template("Say {text}")
    ({'pooling': 'last', 'layers': '-2'}, {})
    """
    if name == KV_EMBEDDING:
        return {"pooling": "last-mean", "pool_prompt": True, "prompts": {"query": _KV_QUERY}}
    layers = {"layers": "-2"} if name in _SECOND_LAST else {}
    return {"pooling": NAMED_POOLING, **layers} if name in NAMED and name != REWRITE else {}


def layer_numbers(layers: str, n_layers: int) -> tuple[int, ...]:
    """Return which layers' states are averaged, as transformers counts ``hidden_states``.

    0 are the embeddings, i is the output of the i-th layer, and ``n_layers`` the last hidden state, after the final
    norm. ``all`` is 1 to n, ``-1`` the last, ``-2`` the layer before it.

    >>> layer_numbers("last", 8), layer_numbers("0+6-8", 8), layer_numbers("-2", 8)
    ((8,), (0, 6, 7, 8), (7,))
    """
    check_layers(layers)
    if _FROM_THE_END.fullmatch(layers):
        if (number := n_layers + 1 + int(layers)) < 0:
            raise ConfigError(f"layers={layers}: the model has {n_layers} layers")
        return (number,)
    return (n_layers,) if layers == LAST_LAYER else _numbers("layers", layers, n_layers)


def rerouted_layers(reroute: str, n_layers: int) -> tuple[int, ...]:
    """Return in which layers, from 1 to ``n_layers``, the last token's key and value are put before the text.

    >>> rerouted_layers("none", 8), rerouted_layers("3+5-6", 8)
    ((), (3, 5, 6))
    """
    check_reroute(reroute)
    return () if reroute == NO_REROUTE else _numbers("reroute", reroute, n_layers)


def _numbers(name: str, spelled: str, n_layers: int) -> tuple[int, ...]:
    if spelled == ALL_LAYERS:
        return tuple(range(1, n_layers + 1))
    numbers: set[int] = set()
    for low, high in _ranges(spelled):
        if high > n_layers:
            raise ConfigError(f"{name}={spelled}: the model has {n_layers} layers")
        numbers |= set(range(low, high + 1))
    return tuple(sorted(numbers))


def _ranges(spelled: str) -> list[tuple[int, int]]:
    parts = [part.partition("-") for part in spelled.split("+")]
    return [(int(low), int(high or low)) for low, _, high in parts]


def check_layers(layers: str) -> None:
    """Refuse what ``layer_numbers`` does not understand."""
    if layers != LAST_LAYER and not _FROM_THE_END.fullmatch(layers):
        _check_numbers("layers", layers, LAST_LAYER)


def check_reroute(reroute: str) -> None:
    """Refuse what ``rerouted_layers`` does not understand."""
    if reroute == NO_REROUTE:
        return
    _check_numbers("reroute", reroute, NO_REROUTE)
    if reroute != ALL_LAYERS and min(low for low, _ in _ranges(reroute)) < 1:
        raise ConfigError(f"reroute={reroute}: layers are counted from 1")


def _check_numbers(name: str, spelled: str, usual: str) -> None:
    if spelled == ALL_LAYERS:
        return
    if not _LAYERS.fullmatch(spelled):
        from_the_end = ", -2" if usual == LAST_LAYER else ""
        raise ConfigError(f"{name}={spelled!r} is none of {usual}, all, 6{from_the_end}, 4-8 and 1+8")
    for low, high in _ranges(spelled):
        if high < low:
            raise ConfigError(f"{name}={spelled}: {low}-{high} runs backwards")


def transform_parts(name: str) -> tuple[str, int | None]:
    """Return the kind of a transform and its number: dimensions that are kept, directions that are taken out.

    >>> transform_parts("whitening-128"), transform_parts("all-but-the-top")
    (('whitening', 128), ('all-but-the-top', None))
    """
    if name == NO_TRANSFORM:
        return name, None
    match = _TRANSFORM.fullmatch(name)
    numbered = match is not None and match[2] is not None
    if match is None or match[2] == "0" or numbered is {TRUNCATE: False, STANDARDIZATION: True}.get(match[1]):
        known = [NO_TRANSFORM, STANDARDIZATION, WHITENING, ALL_BUT_THE_TOP, f"{WHITENING}-256", f"{TRUNCATE}-128"]
        raise unknown_name("transform", name, known)
    return match[1], None if match[2] is None else int(match[2])


class PromptText(str):
    """A prompt that is known to be a text, although it may be a single word."""

    __slots__ = ()


def choose_prompt(stored: Mapping[str, str], prompt: str | None, prompt_name: str | None) -> str:
    """Return the text that a prompt given by itself, or by the name of a stored one, puts before every text.

    A single word is refused as a text: it would be glued to the first word of every text, and was meant as a name.

    >>> choose_prompt({"query": "Question: "}, None, "query")
    'Question: '
    """
    if (prompt is None) == (prompt_name is None):
        raise ConfigError("give a text as prompt or the name of a stored one as prompt_name, not both")
    given = prompt_name if prompt is None else prompt
    if not isinstance(given, str):
        raise ConfigError(f"a prompt is a text, and so is the name of one, not {given!r}")
    if prompt is None:
        if given in stored:
            return stored[given]
        if stored:
            raise unknown_name("prompt", given, list(stored))
        raise ConfigError(
            f"unknown prompt {given!r}: this encoder has none by name; store some (load(prompts={{{given!r}: TEXT}})) "
            "or give the text itself as prompt"
        )
    alone = given in stored or (given.isascii() and given.isidentifier())
    if alone and not isinstance(given, PromptText):
        raise ConfigError(
            f"prompt={given!r} would put this very word before every text; a stored prompt is named by prompt_name, "
            f"and a text that is put before others ends in a space or a colon, such as {given + ': '!r}"
        )
    return given
