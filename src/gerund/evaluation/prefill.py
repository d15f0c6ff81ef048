"""Embeds a task's texts under many plans of one model at once, before the task asks for them.

Knows: contenders, sweeps, the cache. Does not know: scores.
"""

from collections.abc import Sequence
from itertools import groupby

from gerund.evaluation.contender import Contender
from gerund.evaluation.task import Settings, Task
from gerund.inference.sweeping import encode_each
from gerund.inference.tokens import Tokens


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
    able = [one for one in contenders if not one.is_bm25 and one.cache is not None and _shares(one)]
    for _, group in groupby(able, key=_kinship):
        kin = list(group)
        if len(kin) > 1:
            _fill(kin, task.prompt(settings), texts, settings)


def _fill(kin: list[Contender], prompt: str | None, texts: list[str], settings: Settings) -> None:
    text_of_prompt = kin[0].lm.encoder.prompt_text(prompt)
    shelves = [one.cache.shelf(one.fingerprint, text_of_prompt) for one in kin if one.cache is not None]
    missing = [text for text in texts if any(not shelf.holds(text) for shelf in shelves)]
    needy = [one for one, shelf in zip(kin, shelves, strict=True) if any(not shelf.holds(text) for text in missing)]
    if len(needy) < 2:
        return
    tokens: list[Tokens | None] = kin[0].lm.tokens(missing, prompt, empty="zeros")
    vectors = encode_each([one.lm.reader for one in needy], tokens, show=settings.show_progress)
    for one, own in zip(needy, vectors, strict=True):
        if one.cache is not None:
            one.cache.put(one.fingerprint, text_of_prompt, missing, own)


def _shares(contender: Contender) -> bool:
    return not contender.lm.reader.plan.repeats_text


def _kinship(contender: Contender) -> tuple[int, str, bool, int | None]:
    """What contenders of one sweep have in common: the model and the tokens."""
    lm = contender.lm
    return id(lm.model), lm.encoder.prompt, lm.encoder.append_eos, lm.max_length
