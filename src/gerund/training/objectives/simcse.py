"""SimCSE: the same text read twice under different dropout (Gao et al. 2021; LLM2Vec's second stage).

Knows: which texts make a pair. Does not know: the loss.
"""

from typing import TYPE_CHECKING, Any

from gerund.training.objectives.base import Batches

if TYPE_CHECKING:
    from gerund.training.corpus.framing import Framing
    from gerund.training.corpus.texts import Texts
    from gerund.training.objectives.contrastive import Group


class SimcseBatches(Batches):
    """Every text twice.

    Args:
        texts: Token ids by number.
        framing: Puts prompt and special tokens around them.
        group: Makes a group of texts into tensors.
    """

    def __init__(self, texts: "Texts", framing: "Framing", group: "Group") -> None:
        self.texts, self.framing, self.group = texts, framing, group

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive`` with the same texts; dropout tells them apart."""
        del step
        texts = [self.framing.frame(self.texts.row(number)) for number in range(first, first + count)]
        batch = self.group(texts)
        return {"query": batch, "positive": dict(batch)}
