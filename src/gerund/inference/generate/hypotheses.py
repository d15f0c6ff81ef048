"""What a search keeps of a prompt: continuations so far, their scores, the random numbers that they go on with.

Knows: tokens, scores, random generators. Does not know: models, how anything is continued.
"""

from dataclasses import dataclass

import torch

from gerund.inference.generate.sampling import generator_for, sample_seed
from gerund.types import Candidate, Ranked, Usage

# Stands where a continuation that is finished had its random numbers, which are 5 kB.
SPENT = torch.Generator()


@dataclass(frozen=True)
class Hypothesis:
    """A continuation so far.

    Attributes:
        tokens: its tokens, without an end token.
        logprob: the sum of their log-probabilities under the untouched model, that of the end token included.
        ended: whether the model ended it.
        full: whether there is room for more.
        generator: the random numbers that it goes on with, if it does.
        text: its text, once it was scored.
        score: what the scorer gave it.
    """

    tokens: tuple[int, ...]
    logprob: float
    ended: bool
    full: bool
    generator: torch.Generator
    text: str = ""
    score: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether it can be written on."""
        return not (self.ended or self.full)

    def as_candidate(self) -> Candidate:
        """Return it as a result."""
        scored = len(self.tokens) + self.ended
        mean = self.logprob / scored if scored else 0.0
        return Candidate(self.text, list(self.tokens), mean, self.ended, self.score)


@dataclass
class SearchedPrompt:
    """A prompt and the search for its continuation."""

    number: int
    seed: int
    ids: list[int]
    room: int
    beams: list[Hypothesis]
    history: list[list[Candidate]]
    written: int = 0  # tokens, of all continuations

    def result(self) -> Ranked:
        """Return what is best now, with all that competed."""
        kept = [beam.as_candidate() for beam in self.beams]
        best = kept[0]
        return Ranked(
            *(best.text, best.token_ids, best.score, best.finished, best.rank_score, kept, self.history),
            usage=Usage(len(self.ids), self.written),
        )


def nothing(seed: int) -> Hypothesis:
    """Return the empty continuation of a prompt, with the random numbers of plain generation."""
    return Hypothesis((), 0.0, False, False, torch.Generator().manual_seed(sample_seed(seed, 0)))


def generator_of(seed: int, beam: Hypothesis, key: tuple[int, int, int]) -> torch.Generator:
    """Return the random numbers of a sample: of the first one those of the beam itself."""
    if key[-1]:
        return generator_for(seed, 0, *key)
    own = torch.Generator()
    own.set_state(beam.generator.get_state())
    return own
