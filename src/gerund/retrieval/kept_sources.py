"""Chunks that were read once, each behind the instructions, and are set one behind another for the next question.

It is an approximation: a chunk that was read apart has not seen those before it. What it saves is the reading of them.

Knows: prompts, sessions, caches on the disk. Does not know: how chunks are found, how an answer is written.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from gerund.errors import ConfigError, DataError, FingerprintError, GerundError
from gerund.jobs.disk_cache import DiskCache
from gerund.retrieval.asking import Asked
from gerund.retrieval.prompting import AnswerPrompt, Prompter
from gerund.types import Source

if TYPE_CHECKING:
    from gerund.inference.generate.session import Session
    from gerund.inference.generate.session_files import Kept
    from gerund.language_model import LanguageModel

# Two texts of one token each: what prompts with either have in common does not depend on the text.
DUMMIES = ("a", "7")


def disk_cache(where: DiskCache | str | Path) -> DiskCache:
    """Return a cache, given as itself or as its folder."""
    return where if isinstance(where, DiskCache) else DiskCache(where)


class KeptSources:
    """Makes prompts of sources that were read before.

    Args:
        lm: the model that reads them.
        prompter: makes its prompts.
        cache: where what was read is kept. It holds the chunks' texts too.
    """

    def __init__(self, lm: "LanguageModel", prompter: Prompter, cache: DiskCache) -> None:
        self.lm, self.prompter, self.cache = lm, prompter, cache

    def answer_prompt(
        self, asked: Asked, exact: AnswerPrompt, known: "Session | None"
    ) -> "tuple[AnswerPrompt, Session]":
        """Return what a model reads for a question, and a session that has all of it but the end.

        Args:
            asked: the question.
            exact: what it would read without a cache.
            known: the instructions, as the model has read them.

        Raises:
            ConfigError: what the model read at one place cannot be moved to another.
        """
        if known is None:
            raise ConfigError(f"{self.lm.name} keeps more than keys and values of a text; leave approximate_cache out")
        _, room = self.prompter.room(asked.max_new_tokens)
        for count in range(len(exact.sources), 0, -1):
            sources = exact.sources[:count]
            between = self._between(asked, replace(exact, sources=sources))
            texts = [self.lm.tokenizer(one.text.strip(), add_special_tokens=False).input_ids for one in sources]
            if room is None or sum(map(len, [*between, *texts])) <= room:
                session = self._joined(between[:-1], texts, known)
                return replace(exact, ids=[*session.token_ids, *between[-1]], sources=sources), session
        raise ConfigError("the best chunk fills the model's context; leave approximate_cache out")

    def _between(self, asked: Asked, exact: AnswerPrompt) -> list[list[int]]:
        """Return the token ids of a prompt before, between and behind its sources' texts."""
        alike = [_with_text(exact.sources, dummy) for dummy in DUMMIES]
        prompts = [self.prompter.prompt(asked.question, sources, exact.history) for sources in alike]
        one, other = (self.prompter.prompt_ids(prompt) for prompt in prompts)
        places = [place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]]
        if len(one) != len(other) or len(places) != len(exact.sources):
            raise ConfigError(
                f"the tokenizer of {self.lm.name} joins sources with what surrounds them; leave approximate_cache out"
            )
        borders = [-1, *places, len(one)]
        return [one[left + 1 : right] for left, right in pairwise(borders)]

    def _joined(self, between: Sequence[list[int]], texts: Sequence[list[int]], known: "Session") -> "Session":
        start, first = len(known.token_ids), between[0]
        session = known if first[:start] == known.token_ids else self.lm.read(first)
        unread = [first[len(session.token_ids) :], *between[1:]]
        for ids, rest in zip(texts, unread, strict=True):
            if rest:
                session = session.read(rest)
            session = session.with_tail(self._read(ids, known), start)
        return session

    def _read(self, ids: list[int], known: "Session") -> "Kept":
        """Return a chunk as the model has read it behind the instructions: now, or some time before."""
        from gerund.inference.generate.session_files import cache_key, load_kept, save_kept

        key = cache_key(self.lm, known.token_ids, ids)
        if (found := self.cache.get(key)) is not None:
            try:
                kept = load_kept(found, self.lm)
            except (DataError, FingerprintError):
                self.cache.drop(key)
            else:
                if kept.token_ids == ids:
                    return kept
        kept = known.read(ids).tail(len(known.token_ids))
        try:
            self.cache.put(key, lambda folder: save_kept(kept, folder))
        except GerundError as error:
            warnings.warn(f"what was read of a chunk is not kept: {error}", stacklevel=2)
        return kept


def _with_text(sources: Sequence[Source], text: str) -> list[Source]:
    return [replace(one, text=text) for one in sources]
