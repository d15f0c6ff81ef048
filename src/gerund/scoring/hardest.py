"""Wrong continuations that a scorer takes for right ones (RankGen, appendix C.1).

Knows: a scorer, a pool of texts. Does not know: where the texts are from.
"""

from collections.abc import Sequence

from gerund.types import Scorer

# Among so many stretches of a document the hardest are looked for; the paper takes all of them.
POOL = 100


def hardest(scorer: Scorer, prefix: str, pool: Sequence[str], count: int) -> list[str]:
    """Return the texts of a pool that the scorer likes best behind a prefix, best first.

    Args:
        scorer: likes texts.
        prefix: the prefix.
        pool: texts without the space that would begin them.
        count: how many at most.
    """
    if not pool:
        return []
    [scores] = scorer.score([prefix], [[f" {one}" for one in pool]])
    order = sorted(range(len(pool)), key=lambda place: -scores[place])
    return [pool[place] for place in order[:count]]
