"""Embeds a task's texts or words under many plans of one model at once, before the task asks for them.

Knows: language models among the systems, sweeps, the cache. Does not know: scores.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from gerund.evaluation.systems.base import System
from gerund.evaluation.systems.embeddings import key_of_text
from gerund.evaluation.systems.language_model import LanguageModelSystem
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.inference.encode.spans import WordPooling, check_words, word_vectors
from gerund.inference.encode.sweep import encode_each, encode_tokens_each
from gerund.inference.encode.texts import text_tokens
from gerund.inference.tokens import Tokens

# Vectors of words that are held at once: 1 GB.
_MOST_BYTES = 1 << 30


def precompute(systems: Sequence[System], task: Task, config: EvaluationConfig) -> None:
    """Fill the caches of systems that are the same model under several plans with the vectors of a task.

    Layers that two plans share run once. Systems without a cache, alone with their model, whose plan
    gives the text twice, that read in templates or off several layers, or for which others encode, are left to
    themselves.

    Args:
        systems: any; those of one model stand together.
        task: its ``texts`` are embedded with its prompt.
        config: the evaluation's.
    """
    texts = list(dict.fromkeys(task.texts(config)))
    if not texts:
        return
    models = [one for one in systems if isinstance(one, LanguageModelSystem)]
    able = [one for one in models if one.cache is not None and one.elsewhere is None and _shares(one)]
    for _, group in groupby(able, key=_kinship):
        kin = list(group)
        if len(kin) > 1:
            _fill(kin, task.prompt(config), texts, config)


def word_groups(systems: Sequence[System], sentences: Sequence[Sequence[str]]) -> list[list[System]]:
    """Return the systems in groups whose word vectors fit the memory together.

    Those of one model stand together; who cannot share a pass is a group of its own.
    """
    n_words = sum(map(len, sentences))
    groups: list[list[System]] = [[one] for one in systems if not isinstance(one, LanguageModelSystem)]
    models = [one for one in systems if isinstance(one, LanguageModelSystem)]
    for _, same in groupby(models, key=_kinship):
        kin = list(same)
        able = [one for one in kin if _shares(one)]
        groups += [[one] for one in kin if not _shares(one)]
        room = max(1, _MOST_BYTES // max(1, 4 * n_words * kin[0].lm.dimensions))
        groups += [[*able[start : start + room]] for start in range(0, len(able), room)]
    return groups


@contextmanager
def precomputed_words(
    group: Sequence[System],
    sentences: Sequence[Sequence[str]],
    *,
    prompt: str | None,
    pooling: WordPooling = "mean",
    shift: bool,
    config: EvaluationConfig,
) -> Iterator[None]:
    """Hold the word vectors of a group of ``word_groups`` while the block runs; a group of one computes its own.

    Args:
        group: systems of one model.
        sentences: lists of words.
        prompt: as in ``EncodesWords.encode_words``.
        pooling: as in ``EncodesWords.encode_words``.
        shift: as in ``EncodesWords.encode_words``.
        config: the evaluation's.
    """
    models = [one for one in group if isinstance(one, LanguageModelSystem)]
    if len(models) > 1:
        unique = list(dict.fromkeys(map(tuple, check_words(sentences))))
        lm = models[0].lm
        tokens = text_tokens(lm.runtime, [" ".join(words) for words in unique], prompt, offsets=True)
        for one in models:
            one.words[prompt, pooling, shift] = {}

        def keep(place: int, row: int, states_TD: np.ndarray) -> None:
            read = tokens[row]
            if read is not None:
                vectors = word_vectors(unique[row], read, states_TD, pooling=pooling, shift=shift)
                models[place].words[prompt, pooling, shift][unique[row]] = vectors

        encode_tokens_each([one.lm.runtime for one in models], tokens, keep, show=config.show_progress)
    try:
        yield
    finally:
        for one in models:
            one.words.clear()


def _fill(kin: list[LanguageModelSystem], prompt: str | None, texts: list[str], config: EvaluationConfig) -> None:
    text_of_prompt = kin[0].lm.encoder.prompt_text(prompt)
    stores = [one.cache.store(one.cache_key, text_of_prompt) for one in kin if one.cache is not None]
    keys = {text: key_of_text(text) for text in texts}
    missing = [text for text, key in keys.items() if any(key not in store for store in stores)]
    new = [keys[text] for text in missing]
    needy = [one for one, store in zip(kin, stores, strict=True) if any(key not in store for key in new)]
    if len(needy) < 2:
        return
    tokens: list[Tokens | None] = text_tokens(kin[0].lm.runtime, missing, prompt, empty="zeros")
    cache = needy[0].cache
    assert cache is not None
    everything = " ".join([*(one.cache_key for one in needy), text_of_prompt])
    with cache.shard(everything, new) as kept:
        vectors = encode_each([one.lm.runtime for one in needy], tokens, show=config.show_progress, kept=kept)
        for one, own in zip(needy, vectors, strict=True):
            if one.cache is not None:
                one.cache.put(one.cache_key, text_of_prompt, missing, own)


def _shares(system: LanguageModelSystem) -> bool:
    lm = system.lm
    others = lm.encoder.templates or lm.encoder.reads_beside or lm.transform is not None
    return not (lm.runtime.plan.repeats_text or others)


def _kinship(system: LanguageModelSystem) -> tuple[int, str, bool, int | None]:
    """What systems of one sweep have in common: the model and the tokens."""
    lm = system.lm
    return id(lm.model), lm.encoder.prompt, lm.encoder.append_eos, lm.max_length
