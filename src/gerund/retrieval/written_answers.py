"""Written answers: what a model reads for a question, the part of it that is always the same read once.

Knows: prompts, sessions. Does not know: how chunks are found, files.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gerund.errors import ConfigError
from gerund.retrieval.asking import Asked, Written
from gerund.retrieval.kept_sources import DUMMIES, KeptSources, disk_cache
from gerund.retrieval.prompting import Prompter
from gerund.types import Source

if TYPE_CHECKING:
    from gerund.inference.generate.session import Session
    from gerund.language_model import LanguageModel


class AnswerWriter:
    """Prepares answers out of numbered sources.

    Args:
        lm: the model that writes them.
    """

    def __init__(self, lm: "LanguageModel") -> None:
        self.lm = lm
        self.prompter = Prompter(lm.model, lm.tokenizer)
        self._begun: Session | None = None
        self._tried = False

    def written(self, asked: Asked, sources: Sequence[Source]) -> Written:
        """Return what a model is to write.

        Raises:
            TextError: the question does not fit into the model's context.
        """
        answer_prompt = self.prompter.answer_prompt(asked.question, sources, asked.history, asked.max_new_tokens)
        known = self._instructions()
        if asked.approximate_cache is not None and answer_prompt.sources:
            kept = KeptSources(self.lm, self.prompter, disk_cache(asked.approximate_cache))
            return Written(asked, self.lm, *kept.answer_prompt(asked, answer_prompt, known))
        fits = known is not None and answer_prompt.ids[: len(known.token_ids)] == known.token_ids
        return Written(asked, self.lm, answer_prompt, known if fits else None)

    def _instructions(self) -> "Session | None":
        """Return the instructions, which stand before everything else, as the model has read them once."""
        if not self._tried:
            self._tried = True
            prompts = [
                self.prompter.prompt_ids(self.prompter.prompt(one, [Source(1, one, 0, 1, one, one)], ()))
                for one in DUMMIES
            ]  # fmt: skip
            self._begun = read_once(self.lm, common_start(*prompts))
        return self._begun


def read_once(lm: "LanguageModel", ids: Sequence[int]) -> "Session | None":
    """Return a session that has read these tokens; None for none, or where the model cannot read on from one."""
    if not ids or not hasattr(lm, "read"):
        return None
    session = lm.read(list(ids))
    try:
        session.read(ids[-1:])
    except ConfigError:
        return None
    return session


def common_start(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return the tokens with which two prompts both begin.

    >>> common_start([1, 2, 3], [1, 2, 4, 5])
    [1, 2]
    """
    count = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return list(one[: min(len(one), len(other)) if count is None else count])
