"""Shared by all integrations: load a model, build generation settings, encode, rerank."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from numbers import Real
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from gerund.entry import load
from gerund.errors import ConfigError, unknown_name
from gerund.inference.generate.config import GenerationConfig, GenerationKeywords, ToolPrompt
from gerund.inference.generate.prompts import require_chat_template
from gerund.inference.generate.tools import ToolKeywords
from gerund.inference.text_ids import text_ids
from gerund.language_model import LanguageModel
from gerund.retrieval.index import Index, open_index
from gerund.settings.aliases import names_of
from gerund.settings.model_spec import ModelSpec
from gerund.settings.ranking import RelevanceMeasure
from gerund.settings.sampling import Sampling, SamplingKeywords
from gerund.types import Generation

Model = LanguageModel | ModelSpec | str | Path | None
"""A model in memory, which several objects may share, or an argument of ``gerund.load``."""

Job = Literal["query", "document"]

_SAMPLING = tuple(field.name for field in fields(Sampling))
_OPTIONS = tuple(name for name in names_of(GenerationKeywords) if name not in SamplingKeywords.__annotations__)
_TOOLS = tuple(ToolKeywords.__annotations__)
_LENGTHS = ("max_new_tokens", "max_tokens")
SETTINGS = (*_LENGTHS[:1], *_SAMPLING, *_OPTIONS)
"""Settings of a generation, by their names in ``gerund.Sampling`` and ``generate``."""


class Request(NamedTuple):
    """The arguments of ``generate``, ``chat`` and the streams after the prompt."""

    max_new_tokens: int
    sampling: Sampling
    options: dict[str, Any]


def model_of(given: Model) -> LanguageModel:
    """Return a model in memory."""
    if given is None or isinstance(given, ModelSpec | str | Path):
        return load(given)
    if not isinstance(given, LanguageModel) and not callable(getattr(given, "generate", None)):
        raise ConfigError(f"a model is what gerund.load takes or gives, such as a folder's name, not {given!r}")
    return given


def chat_model_of(given: Model) -> LanguageModel:
    """Return a model in memory that was trained to chat."""
    lm = model_of(given)
    require_chat_template(lm.tokenizer)
    return lm


def index_of(given: Index | str | Path, model: Model = None) -> Index:
    """Return an index that is open."""
    return given if isinstance(given, Index) else open_index(given, model)


def request(*given: Mapping[str, Any]) -> Request:
    r"""Return generation settings from flat mappings; later ones win, and None is ignored.

    >>> asked = request({"max_tokens": 64, "temperature": 0.7}, {"stop": ["\n"], "temperature": None})
    >>> asked.max_new_tokens, asked.sampling.temperature, asked.options
    (64, 0.7, {'stop': ['\n']})
    """
    settings: dict[str, Any] = {"max_new_tokens": 256}
    for mapping in given:
        new = {name: value for name, value in mapping.items() if value is not None}
        for name in new:
            if name not in (*_LENGTHS, *SETTINGS):
                raise unknown_name("setting", name, list(SETTINGS))
        if "max_tokens" in new:
            new["max_new_tokens"] = new.pop("max_tokens")
        settings |= new
    sampling = Sampling(**{name: settings[name] for name in _SAMPLING if name in settings})
    options: dict[str, Any] = {name: settings[name] for name in _OPTIONS if name in settings}
    GenerationConfig.of(settings["max_new_tokens"], sampling, options)  # type: ignore[arg-type]
    return Request(settings["max_new_tokens"], sampling, options)


def tool_options(given: Mapping[str, Any], tool_prompt: ToolPrompt | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options of ``chat`` that are about tools, and the other settings of a call.

    >>> tool_options({"tools": [], "seed": 1}, "generic")
    ({'tools': [], 'tool_prompt': 'generic'}, {'seed': 1})
    """
    tools = {name: given[name] for name in _TOOLS if name in given}
    if tool_prompt is not None:
        tools["tool_prompt"] = tool_prompt
    return tools, {name: value for name, value in given.items() if name not in _TOOLS}


def stop_strings(*given: str | Sequence[str] | None) -> list[str]:
    """Return all stop strings as one list."""
    return [text for stop in given if stop for text in ([stop] if isinstance(stop, str) else stop)]


def facts(lm: LanguageModel, done: Generation) -> dict[str, Any]:
    """Return metadata of a completion, ready for JSON."""
    metadata: dict[str, Any] = {"model_name": lm.name, "finish_reason": done.finish_reason}
    if done.stop is not None:
        metadata["stop"] = done.stop
    if done.logprobs is not None:
        metadata["logprobs"] = [
            {
                "token": token.text,
                "logprob": token.logprob,
                "top": [{"token": other.text, "logprob": other.logprob} for other in token.top],
            }
            for token in done.logprobs
        ]
    return metadata


def usage_of(completion: Generation) -> dict[str, int]:
    """Return the token counts of a completion by name."""
    return {name: getattr(completion.usage, name) for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def vectors(lm: LanguageModel, texts: Sequence[str], job: Job, prompt: str | None = None) -> list[list[float]]:
    """Return the vectors of queries or documents, as ``encode`` gives them; zeros for a text without a character."""
    if not texts:
        return []
    name = job if prompt is None and job in lm.encoder.prompts else None
    embeddings: np.ndarray = lm.encode(list(texts), prompt, empty="zeros", show_progress=False, prompt_name=name)
    return [[float(number) for number in row] for row in embeddings]


def most_relevant(
    lm: LanguageModel,
    query: str,
    texts: Sequence[str | None],
    top_k: int | None,
    by: RelevanceMeasure | None,
    scores: Sequence[Any] = (),
    *,
    weight: float | None = None,
    deadline: float | None = None,
) -> list[tuple[int, float]]:
    """Return the positions of the most relevant texts and their scores, best first; blank texts are skipped.

    The scores that all texts bring from a first stage are fused with the measure; ``weight`` counts only there. After
    ``deadline`` seconds no further text is read.
    """
    filled = [place for place, text in enumerate(texts) if text and text.strip()]
    if not filled:
        return []
    first = [scores[place] for place in filled] if scores else []
    is_scored = bool(first) and all(isinstance(score, Real) and math.isfinite(score) for score in first)
    kept = [texts[place] or "" for place in filled]
    stage: dict[str, Any] = {"scores": first, "weight": weight} if is_scored else {}
    ranking = lm.rerank(query, kept, top_k, by=by, deadline=deadline, **stage)
    return [(filled[index], score) for index, score in zip(ranking.indices, ranking.scores, strict=True)]


def token_ids(lm: LanguageModel, text: str) -> list[int]:
    """Return a text's token ids, without special tokens."""
    return text_ids(lm.tokenizer, text, specials=False) if text else []
