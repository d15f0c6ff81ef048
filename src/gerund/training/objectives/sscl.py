"""SSCL: a text and an altered text with the same meaning are a pair (MAGNET, section 3.2.2).

The paper alters texts with a paraphrasing model; a file of such pairs may be given. Without one, words are left
out, swapped and cropped, which needs no second model.

Knows: which texts make a pair. Does not know: the loss.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.data.augmentation import augment
from gerund.training.objectives.base import Batches, row_generator

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gerund.inference.tokens import Tokens
    from gerund.training.corpus.framing import Framing
    from gerund.training.corpus.texts import Texts
    from gerund.training.objectives.contrastive import Group
    from gerund.training.recipe_objectives import SsclConfig


class AlteredBatches(Batches):
    """Every text with an altered copy of it.

    Args:
        texts: Token ids by number.
        framing: Puts prompt and special tokens around them.
        group: Makes a group of texts into tensors.
        tokenizer: Turns ids into words and back.
        config: How much is altered, and the longest text.
        seed: Decides what is altered.
    """

    def __init__(
        self,
        texts: "Texts",
        framing: "Framing",
        group: "Group",
        *,
        tokenizer: "PreTrainedTokenizerBase",
        config: "SsclConfig",
        seed: int,
    ) -> None:
        self.texts, self.framing, self.group = texts, framing, group
        self.tokenizer, self.config, self.seed = tokenizer, config, seed

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive``."""
        del step
        queries, positives = [], []
        for number in range(first, first + count):
            ids = self.texts.row(number)
            queries.append(self.framing.frame(ids))
            positives.append(self._altered(ids, number) or queries[-1])
        return {"query": self.group(queries), "positive": self.group(positives)}

    def _altered(self, ids: np.ndarray, number: int) -> "Tokens | None":
        """Return another version of a text; None for one of blank lines alone, which has no words to alter."""
        config = self.config
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if not text.strip():
            return None
        rng = row_generator(self.seed, number)
        altered = augment(text, rng, deletion=config.deletion, swap=config.swap, crop=config.crop)
        return self.framing.frame_text(altered, config.length)
