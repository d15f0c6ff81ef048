"""What the demo measures: frozen values, ready for JSON."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hit:
    """One answer to a search."""

    text: str
    score: float
    right: bool


@dataclass(frozen=True)
class SearchResults:
    """What the searches found, under one attention plan.

    Attributes:
        plan: name of the plan, and of the adapter where there is one; or what the baseline is called.
        answers: for each search its best documents, best first.
        right: fraction of those answers whose topic is the search's.
        neighbours: fraction of the documents' own nearest documents that have the same topic.
    """

    plan: str
    answers: tuple[tuple[Hit, ...], ...]
    right: float
    neighbours: float


@dataclass(frozen=True)
class Scored:
    """A continuation with its score; scores of one beginning can be compared."""

    text: str
    score: float


@dataclass(frozen=True)
class Written:
    """How one beginning was continued.

    Attributes:
        prompt: the beginning.
        plain: one continuation, sampled without looking at any score.
        ranked: those that were sampled to choose from, best first; empty where the model cannot rank.
    """

    prompt: str
    plain: str
    ranked: tuple[Scored, ...]


@dataclass(frozen=True)
class Fitting:
    """Which of several sentences a scorer lets follow a beginning.

    Attributes:
        prompt: the beginning.
        candidates: the sentences, best first.
        right: the one that follows it.
    """

    prompt: str
    candidates: tuple[Scored, ...]
    right: str

    @property
    def is_right(self) -> bool:
        """Whether the right one came first."""
        return self.candidates[0].text == self.right


@dataclass(frozen=True)
class Filled:
    """A gap, filled in two ways.

    Attributes:
        before: the text before the gap.
        after: the text behind it.
        span: the filling, seeing both sides.
        left_only: the filling by the untouched model, seeing the left side.
        original: what stood there.
    """

    before: str
    after: str
    span: str
    left_only: str
    original: str


@dataclass(frozen=True)
class Verification:
    """What was compared with the model as plain transformers loads it, and what came out.

    Attributes:
        tokens: how many positions were compared.
        numbers: how many logits that makes.
        difference: the largest difference between two logits.
        same_text: whether greedy decoding wrote the same tokens.
    """

    tokens: int
    numbers: int
    difference: float
    same_text: bool

    @property
    def is_equal(self) -> bool:
        """Whether every logit is the same to the last bit, and so is the text."""
        return self.difference == 0 and self.same_text


@dataclass(frozen=True)
class DemoResults:
    """All that one run of the demo found.

    Attributes:
        found: the searches under the model's own plan.
        baseline: the same with the untouched causal attention.
        written: the beginnings, continued.
        scorer: what ranked them.
        fitting: the same beginnings with sentences to choose from.
        filled: the gaps; empty where the model cannot see both sides of one.
        verification: whether it is still the same language model.
    """

    found: SearchResults
    baseline: SearchResults
    written: tuple[Written, ...]
    scorer: str
    fitting: tuple[Fitting, ...]
    filled: tuple[Filled, ...]
    verification: Verification
