"""Pairs and triples from files: queries, their positives, and hard negatives (UniMAE, Appendix D).

Knows: which texts make a pair. Does not know: the loss.
"""

from typing import TYPE_CHECKING, Any

from gerund.training.objectives.base import Batches

if TYPE_CHECKING:
    from gerund.training.corpus.framing import Framing
    from gerund.training.corpus.pairs import Examples
    from gerund.training.objectives.contrastive import Group


class ExampleBatches(Batches):
    """Examples in the order that they are dealt in.

    Args:
        examples: Query, positive and negatives by number.
        queries: Frames queries.
        documents: Frames positives and negatives.
        group: Makes a group of texts into tensors.
        length: Longest text in tokens.
    """

    def __init__(
        self, examples: "Examples", queries: "Framing", documents: "Framing", group: "Group", *, length: int
    ) -> None:
        self.texts, self.queries, self.documents = examples, queries, documents
        self.group, self.length = group, length

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query``, ``positive`` and, where examples have any, ``negative``."""
        del step
        rows = [self.texts.row(number) for number in range(first, first + count)]
        groups = {
            "query": [self.queries.frame_text(row.query, self.length) for row in rows],
            "positive": [self.documents.frame_text(row.positive, self.length) for row in rows],
            "negative": [self.documents.frame_text(text, self.length) for row in rows for text in row.negatives],
        }
        return {name: self.group(texts) for name, texts in groups.items() if texts}
