"""Prefixes with their continuations, for an encoder that scores continuations (RankGen, section 2.2).

Knows: which texts stand on which side, markers. Does not know: the loss.
"""

from typing import TYPE_CHECKING, Any

from gerund.inference.tokens import keep_end
from gerund.training.objectives.base import Batches

if TYPE_CHECKING:
    from gerund.training.corpus.framing import Framing
    from gerund.training.corpus.passages import Passages
    from gerund.training.objectives.contrastive import Group


class PassageBatches(Batches):
    """Passages in the order that they are dealt in.

    Args:
        passages: Prefixes, continuations and negatives by number.
        prefixes: Frames prefixes.
        continuations: Frames continuations and negatives.
        group: Makes a group of texts into tensors.
        lengths: Longest prefix and continuation in tokens, special ones and marker included.
        with_negatives: Whether each passage brings a negative of its own.
    """

    def __init__(
        self,
        passages: "Passages",
        prefixes: "Framing",
        continuations: "Framing",
        group: "Group",
        *,
        lengths: tuple[int, int],
        with_negatives: bool,
    ) -> None:
        self.texts, self.prefixes, self.continuations = passages, prefixes, continuations
        self.group, self.lengths, self.with_negatives = group, lengths, with_negatives

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query``, ``positive`` and, where passages bring any, ``negative``."""
        del step
        rows = [self.texts.row(number) for number in range(first, first + count)]
        longest, behind = self.lengths
        room = longest - self.prefixes.room
        tokenizer = self.prefixes.tokenizer
        groups = {
            "query": [
                # What stands right before the continuation says most of it.
                self.prefixes.frame_text(keep_end(tokenizer, example.prefix, room), longest)
                for example, _ in rows
            ],
            "positive": [self.continuations.frame_text(example.continuation.strip(), behind) for example, _ in rows],
        }
        if self.with_negatives:
            negatives = [negative for _, negative in rows if negative is not None]
            groups["negative"] = [self.continuations.frame_text(text.strip(), behind) for text in negatives]
        return {name: self.group(texts) for name, texts in groups.items()}
