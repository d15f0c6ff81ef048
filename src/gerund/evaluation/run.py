"""Carries an evaluation out: every task for every contender, each score kept as soon as it is there.

Knows: tasks, contenders, where scores are kept. Does not know: how a task measures, or what a report looks like.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from gerund.config import EncoderConfig
from gerund.errors import ConfigError, MissingDependencyError
from gerund.evaluation.contender import BM25, Contender
from gerund.evaluation.embedding_cache import EmbeddingCache
from gerund.evaluation.hybrid import HYBRID, Hybrid
from gerund.evaluation.prefill import prefill, prefilled_words, word_groups
from gerund.evaluation.readings import distinct, label_of
from gerund.evaluation.results import Result, ResultStore, key_of
from gerund.evaluation.sentence_encoder import SentenceEncoder
from gerund.evaluation.task import Settings, Task
from gerund.generative_model import GenerativeModel
from gerund.language_model import LanguageModel

_EMBEDDINGS = "embeddings"

# Told what is done: the task, the contender, and the result or None before it is measured.
Tell = Callable[[Task, Contender, Result | None], None]


@dataclass
class Evaluation:
    """What was measured, and who and what is still at hand for pictures.

    Attributes:
        results: one a task and contender, in the order of tasks.
        contenders: who was measured.
        tasks: what was measured.
        settings: what the tasks were told.
        reused: how many results were there before.
    """

    results: list[Result]
    contenders: list[Contender]
    tasks: list[Task]
    settings: Settings
    reused: int = field(default=0)


def contenders_of(
    models: Sequence[LanguageModel | SentenceEncoder | str],
    readings: Sequence[Callable[[EncoderConfig], EncoderConfig]] = (),
    *,
    cache: EmbeddingCache | None = None,
) -> list[Contender]:
    """Return every model under every reading, with names that tell them apart.

    Args:
        models: models in memory; ``"bm25"`` for BM25; ``"hybrid"`` for every model under every reading once more,
            its ranking joined with BM25's. A model of sentence-transformers has one reading, its own.
        readings: each turns a model's own settings into others; none leaves a model as it is.
        cache: where embeddings are kept; None keeps them in memory.

    Raises:
        ConfigError: a reading does not fit a model, ``"hybrid"`` has no model to join with BM25, or a name is neither.
    """
    cache = cache or EmbeddingCache()
    named: list[tuple[str, Callable[[str], Contender]]] = []
    several = len({model.name for model in models if isinstance(model, GenerativeModel)}) > 1
    for model in models:
        if model == HYBRID:
            continue
        if isinstance(model, SentenceEncoder):
            named.append((_short(model.name), partial(model.called, cache=cache)))
            continue
        if not isinstance(model, GenerativeModel):
            if model != BM25:
                raise ConfigError(f"a model in memory, {BM25!r} or {HYBRID!r}, not {model!r}")
            named.append((BM25, partial(Contender, lm=None, cache=cache)))
            continue
        for reading in readings or (lambda own: own,):
            config = reading(model.encoder)
            lm = model if config == model.encoder else model.with_encoder(config)
            label = label_of(config, model.n_layers)
            make = partial(Contender, lm=lm, cache=cache)
            named.append((f"{_short(model.name)}: {label}" if several else label, make))
    labels = distinct([label for label, _ in named])
    found = [make(label) for label, (_, make) in zip(labels, named, strict=True)]
    if HYBRID not in models:
        return found
    hybrids = [Hybrid(one) for one in found if not one.is_bm25]
    if not hybrids:
        raise ConfigError("hybrid joins the ranking of a model with that of BM25; name a model too")
    return [*found, *hybrids]


def _short(name: str) -> str:
    """Return the last part of a model's name that says something: a training leaves all of its models in ``model``.

    >>> [_short(name) for name in ("runs/mine/model", "org/name", "model")]
    ['mine', 'name', 'model']
    """
    path = Path(name)
    return path.parent.name or path.name if path.name == "model" else path.name


def evaluate(
    contenders: Sequence[Contender],
    tasks: Sequence[Task],
    settings: Settings | None = None,
    *,
    folder: Path | None = None,
    tell: Tell | None = None,
) -> Evaluation:
    """Measure every task for every contender.

    Args:
        contenders: who; contenders of one model share the layers that their plans share.
        tasks: what.
        settings: what the tasks are told.
        folder: where finished scores are kept and looked for, so that an interrupted evaluation goes on;
            None keeps nothing.
        tell: called before and after each measurement, and once for each score that was there already.

    Raises:
        ConfigError: no contender, no task, or two contenders of one name.
        DataError: a task's data are malformed.
    """
    if not contenders or not tasks:
        raise ConfigError("an evaluation needs at least one model and one task")
    if len({one.label for one in contenders}) < len(contenders):
        raise ConfigError("two contenders have the same name")
    if not any(_is_able(one, task) for one in contenders for task in tasks):
        raise ConfigError(_why_nobody(contenders))
    done = Evaluation([], list(contenders), list(tasks), settings or Settings())
    store = None if folder is None else ResultStore(folder)
    for task in tasks:
        _measure(task, done, store, tell or (lambda *_: None))
    return done


def cache_in(folder: Path) -> EmbeddingCache:
    """Return the cache that lies in a report's folder."""
    return EmbeddingCache(folder / _EMBEDDINGS)


def _why_nobody(contenders: Sequence[Contender]) -> str:
    """Say why none of the tasks is for any of the contenders."""
    if all(one.only_ranks for one in contenders):
        return "BM25 ranks documents and does nothing else, and none of these tasks is about that"
    if all(one.only_ranks or one.only_encodes for one in contenders):
        return (
            "a model of sentence-transformers gives vectors of whole texts and does nothing else, and these tasks ask "
            "for more"
        )
    return (
        "these tasks ask how probable a text is, which a model with an encoder of its own cannot say; take a "
        "decoder-only model"
    )


def _is_able(one: Contender, task: Task) -> bool:
    if one.only_ranks:
        return task.takes_bm25
    if one.only_encodes:
        return task.takes_vectors
    return one.has_likelihoods or not task.needs_likelihoods


def _measure(task: Task, done: Evaluation, store: ResultStore | None, tell: Tell) -> None:
    able = [one for one in done.contenders if _is_able(one, task)]
    results: dict[str, Result] = {}
    for one in able:
        if store is not None and (found := store.find(task, one, done.settings)) is not None:
            results[one.label] = found
            done.reused += 1
            tell(task, one, found)
    for group, ready in _prepared([one for one in able if one.label not in results], task, done.settings):
        with ready:
            for one in group:
                results[one.label] = _result(task, one, done.settings, store, list(results.values()), tell)
                tell(task, one, results[one.label])
    done.results += [results[one.label] for one in able]


def _prepared(
    contenders: list[Contender], task: Task, settings: Settings
) -> Iterator[tuple[list[Contender], AbstractContextManager[None]]]:
    """Yield contenders in groups, each with a block in which what the group shares is at hand."""
    if not contenders:
        return
    sentences = task.sentences(settings)
    if not sentences:
        prefill(contenders, task, settings)
        yield contenders, nullcontext()
        return
    measured = [one for one in contenders if task.is_measured(one, settings)]
    yield measured, nullcontext()
    for group in word_groups([one for one in contenders if one not in measured], sentences):
        prompt, shift = task.prompt(settings), task.shifts_words
        yield group, prefilled_words(group, sentences, prompt=prompt, shift=shift, settings=settings)


def _result(
    task: Task, one: Contender, settings: Settings, store: ResultStore | None, others: list[Result], tell: Tell
) -> Result:
    if not task.reads_plan:
        for other in others:
            # The same weights write the same under every plan.
            if other.key == key_of(task, one, settings):
                return replace(other, contender=one.label, reading=one.reading(), seconds=0.0)
    tell(task, one, None)
    return _score(task, one, settings, store)


def _score(task: Task, contender: Contender, settings: Settings, store: ResultStore | None) -> Result:
    start = time.perf_counter()
    try:
        score = task.run(contender, settings)
    except ImportError as error:
        raise MissingDependencyError(
            f"{task.name} needs {error.name or 'more packages'}: pip install 'gerund[eval]'"
        ) from error
    seconds = time.perf_counter() - start
    if store is not None:
        return store.add(task, contender, settings, score, seconds)
    return Result.of(task, contender, settings, score, seconds)
