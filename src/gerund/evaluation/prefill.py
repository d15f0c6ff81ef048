"""Embeds a task's texts or words under many plans of one model at once, before the task asks for them.

Knows: contenders, sweeps, the cache. Does not know: scores.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

import numpy as np

from gerund.evaluation.contender import Contender
from gerund.evaluation.task import Settings, Task
from gerund.inference.encode.sweep import encode_each, encode_tokens_each
from gerund.inference.encode.words import check_words, word_vectors
from gerund.inference.tokens import Tokens

# Vectors of words that are held at once: 1 GB.
_MOST_BYTES = 1 << 30


def prefill(contenders: Sequence[Contender], task: Task, settings: Settings) -> None:
    """Fill the caches of contenders that are the same model under several plans with the vectors of a task.

    Layers that two plans share run once. Contenders without a cache, alone with their model, or whose plan
    gives the text twice are left to encode by themselves.

    Args:
        contenders: any; those of one model stand together.
        task: its ``texts`` are embedded with its prompt.
        settings: the evaluation's.
    """
    texts = list(dict.fromkeys(task.texts(settings)))
    if not texts:
        return
    able = [one for one in contenders if one.has_model and one.cache is not None and _shares(one)]
    for _, group in groupby(able, key=_kinship):
        kin = list(group)
        if len(kin) > 1:
            _fill(kin, task.prompt(settings), texts, settings)


def word_groups(contenders: Sequence[Contender], sentences: Sequence[Sequence[str]]) -> list[list[Contender]]:
    """Return the contenders in groups whose word vectors fit the memory together.

    Those of one model stand together; who cannot share a pass is a group of its own.
    """
    n_words = sum(map(len, sentences))
    groups: list[list[Contender]] = []
    for _, same in groupby(contenders, key=_kinship):
        kin = list(same)
        able = [one for one in kin if _shares(one)]
        groups += [[one] for one in kin if not _shares(one)]
        room = max(1, _MOST_BYTES // max(1, 4 * n_words * kin[0].lm.dimensions))
        groups += [able[start : start + room] for start in range(0, len(able), room)]
    return groups


@contextmanager
def prefilled_words(
    group: Sequence[Contender],
    sentences: Sequence[Sequence[str]],
    *,
    prompt: str | None,
    shift: bool,
    settings: Settings,
) -> Iterator[None]:
    """Hold the word vectors of a group of ``word_groups`` while the block runs; a group of one computes its own.

    Args:
        group: contenders of one model.
        sentences: lists of words.
        prompt: as in ``Contender.encode_words``.
        shift: as in ``Contender.encode_words``.
        settings: the evaluation's.
    """
    if len(group) > 1:
        unique = list(dict.fromkeys(map(tuple, check_words(sentences))))
        lm = group[0].lm
        tokens = lm.tokens([" ".join(words) for words in unique], prompt, offsets=True)
        for one in group:
            one.words[prompt, "mean", shift] = {}

        def keep(place: int, row: int, states_TD: np.ndarray) -> None:
            read = tokens[row]
            if read is not None:
                vectors = word_vectors(unique[row], read, states_TD, pooling="mean", shift=shift)
                group[place].words[prompt, "mean", shift][unique[row]] = vectors

        encode_tokens_each([one.lm.runtime for one in group], tokens, keep, show=settings.show_progress)
    try:
        yield
    finally:
        for one in group:
            one.words.clear()


def _fill(kin: list[Contender], prompt: str | None, texts: list[str], settings: Settings) -> None:
    text_of_prompt = kin[0].lm.encoder.prompt_text(prompt)
    shelves = [one.cache.shelf(one.decides, text_of_prompt) for one in kin if one.cache is not None]
    missing = [text for text in texts if any(not shelf.holds(text) for shelf in shelves)]
    needy = [one for one, shelf in zip(kin, shelves, strict=True) if any(not shelf.holds(text) for text in missing)]
    if len(needy) < 2:
        return
    tokens: list[Tokens | None] = kin[0].lm.tokens(missing, prompt, empty="zeros")
    vectors = encode_each([one.lm.runtime for one in needy], tokens, show=settings.show_progress)
    for one, own in zip(needy, vectors, strict=True):
        if one.cache is not None:
            one.cache.put(one.decides, text_of_prompt, missing, own)


def _shares(contender: Contender) -> bool:
    return not contender.lm.runtime.plan.repeats_text


def _kinship(contender: Contender) -> tuple[int, str, bool, int | None]:
    """What contenders of one sweep have in common: the model and the tokens."""
    lm = contender.lm
    return id(lm.model), lm.encoder.prompt, lm.encoder.append_eos, lm.max_length
