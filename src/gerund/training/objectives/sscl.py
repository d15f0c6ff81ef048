"""SSCL: a text and an altered text with the same meaning are a pair (MAGNET, section 3.2.2).

The paper alters texts with a paraphrasing model; a file of such pairs may be given. Without one, words are left
out, swapped and cropped, or written anew by the base itself, which fills them in from both sides. Neither needs a
second model.

Knows: which texts make a pair. Does not know: the loss (``vectors``).
"""

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self
from zlib import crc32

import numpy as np
from pydantic import Field, model_validator

from gerund.data.augmentation import augment
from gerund.errors import TextError
from gerund.training.objectives.base import Batches, Objective, Purpose, TextConfig
from gerund.training.objectives.batches import row_generator
from gerund.training.objectives.contrastive import ExampleBatches, PairFiles
from gerund.training.objectives.vectors import ContrastiveConfig, ContrastiveLosses, TextGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gerund.inference.tokens import Tokens
    from gerund.language_model import LanguageModel
    from gerund.seq2seq_model import Seq2SeqModel
    from gerund.training.corpus.formatting import InputFormatter
    from gerund.training.corpus.texts import Texts
    from gerund.training.objectives.context import Context
    from gerund.training.recipe import Recipe

# A few words at a time keep what a text says better than whole clauses.
_LONGEST_GAP = 4


class SsclConfig(TextConfig, ContrastiveConfig):
    """Self-supervised contrastive learning with an altered text as positive (MAGNET, section 3.2.2)."""

    purpose: ClassVar[Purpose] = Purpose.EMBED_BY_TEXTS
    seed_offset: ClassVar[int | None] = 40

    kind: Literal["sscl"]
    length: int = Field(default=128, ge=2)
    unit: Literal["documents", "sentences"] = "sentences"
    batch_size: int = Field(default=64, ge=2)
    temperature: float = Field(default=0.1, gt=0)
    """Similarities are divided by it (equation 3)."""
    pairs: PairFiles | None = None
    """Texts with paraphrases, as in the paper; left out, positives are made from the sources."""
    deletion: float = Field(default=0.1, ge=0, lt=1)
    """Fraction of the words that a made positive lacks."""
    swap: float = Field(default=0.1, ge=0, le=1)
    """Fraction of its words that change places with a neighbour."""
    crop: float = Field(default=1.0, gt=0, le=1)
    """A made positive keeps a contiguous stretch of at least this fraction of the words."""
    rewritten: float = Field(default=0.0, ge=0, lt=1)
    """Fraction of a made positive's words that the base writes anew, by filling them in from both sides, before
    ``deletion``, ``swap`` and ``crop`` change the rest; 0 for none. Each text is rewritten once and kept in the cache;
    it takes about as long as writing so many words does."""

    @model_validator(mode="after")
    def _one_origin_of_positives(self) -> Self:
        if self.pairs is not None and self.rewritten:
            raise ValueError("sscl.rewritten makes positives, and sscl.pairs brings them: give one of them")
        return self

    def check(self, recipe: "Recipe") -> None:
        """Refuse to have texts rewritten by a model that has learnt nothing."""
        super().check(recipe)
        if self.rewritten and recipe.model.base is None:
            raise ValueError("sscl.rewritten lets the base write, and a model from scratch cannot write yet")

    @property
    def reads_sources(self) -> bool:
        """Whether it reads the recipe's sources."""
        return self.pairs is None

    def prepare(self, context: "Context") -> Objective:
        """Return batches of texts with paraphrases or altered copies, and InfoNCE."""
        from gerund.training.corpus.pairs import Examples

        group = TextGroup.of(context)
        losses = ContrastiveLosses(
            context.model.runtime,
            temperature=self.temperature,
            similarity=self.similarity,
            projection=self.projection,
        ).of(self, context)
        if self.pairs is not None:
            examples = Examples(self.pairs.read(context), seed=context.seed(self))
            return Objective(self.kind, ExampleBatches.of(context, self, examples), losses, {self.kind: self})
        formatter = context.formatter(self)
        base = context.recipe.model.base
        rewriter = Rewriter(base, self.rewritten, context.source.cache) if self.rewritten and base else None
        options: dict[str, Any] = {"tokenizer": context.model.tokenizer, "config": self, "rewriter": rewriter}

        def batches(texts: Any, seed: int) -> Batches:
            return AlteredBatches(texts, formatter, group, seed=seed, **options)

        return context.text_objective(self.kind, self, batches, losses, overhead=formatter.overhead)


class AlteredBatches(Batches):
    """Every text with an altered copy of it.

    Args:
        texts: Token ids by number.
        formatter: Puts prompt and special tokens around them.
        group: Makes a group of texts into tensors.
        tokenizer: Turns ids into words and back.
        config: How much is altered, and the longest text.
        seed: Determines what is altered.
        rewriter: Writes words of a text anew; None for none.
    """

    def __init__(
        self,
        texts: "Texts",
        formatter: "InputFormatter",
        group: TextGroup,
        *,
        tokenizer: "PreTrainedTokenizerBase",
        config: SsclConfig,
        seed: int,
        rewriter: "Rewriter | None" = None,
    ) -> None:
        self.texts, self.formatter, self.group = texts, formatter, group
        self.tokenizer, self.config, self.seed, self.rewriter = tokenizer, config, seed, rewriter

    def make(self, step: int, first: int, count: int) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive``."""
        del step
        queries, positives = [], []
        for number in range(first, first + count):
            ids = self.texts.row(number)
            queries.append(self.formatter.format(ids))
            positives.append(self._altered(ids, number) or queries[-1])
        return {"query": self.group(queries), "positive": self.group(positives)}

    def _altered(self, ids: np.ndarray, number: int) -> "Tokens | None":
        """Return another version of a text; None for one of blank lines alone, which has no words to alter."""
        config = self.config
        text = self.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        if not text.strip():
            return None
        rng = row_generator(self.seed, number)
        if self.rewriter is not None:
            text = self.rewriter(text)
        altered = augment(text, rng, deletion=config.deletion, swap=config.swap, crop=config.crop)
        return self.formatter.format_text(altered, config.length)


class Rewriter:
    """Writes some words of a text anew with a language model that fills gaps, the same ones each time.

    What it wrote is kept in a file, so that no text is rewritten twice, by a resumed training either. The model is the
    base as it is, not the one in training: a text's other version does not depend on the step in which it is read.

    Args:
        base: Which model writes, with its own adapter for filling gaps, where it has one.
        fraction: Of a text's words.
        cache: Folder of the file; None to keep nothing.
    """

    def __init__(self, base: str, fraction: float, cache: Path | None) -> None:
        self.base, self.fraction, self.cache = base, fraction, cache
        self._lm: LanguageModel | Seq2SeqModel | None = None
        self._known: dict[str, str] = {}
        self._file: Path | None = None

    def __call__(self, text: str) -> str:
        """Return another version of a text; the text itself where the model finds none."""
        lm = self._opened()
        if text not in self._known:
            self._known[text] = self._rewritten(lm, text)
            if self._file is not None:
                with self._file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"query": text, "positive": self._known[text]}) + "\n")
        return self._known[text]

    def _rewritten(self, lm: "LanguageModel | Seq2SeqModel", text: str) -> str:
        from gerund.inference.infill.infilling import BLANK
        from gerund.settings.sampling import Sampling

        # The text is the seed, so that it does not matter in which order texts are read.
        sampling = Sampling(temperature=1.0, top_p=0.9, seed=crc32(text.encode()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* expansions of .* were found")
            try:
                found = lm.expand(
                    text.replace(BLANK, ""), 1, fraction=self.fraction, max_tokens=_LONGEST_GAP, sampling=sampling
                )
            except TextError:  # no word in it, or no room for another
                found = []
        return found[0] if found else text

    def _opened(self) -> "LanguageModel | Seq2SeqModel":
        if self._lm is not None:
            return self._lm
        from gerund.entry import load

        self._lm = lm = load(self.base)
        if self.cache is not None:
            what = f"{lm.weights_hash} {lm.adapters.hash('infill')} {self.fraction}"
            key = hashlib.sha256(what.encode()).hexdigest()[:16]
            self.cache.mkdir(parents=True, exist_ok=True)
            for path in sorted(self.cache.glob(f"rewritten-{key}-*.jsonl")):
                self._known |= _pairs_in(path)
            self._file = self.cache / f"rewritten-{key}-{os.environ.get('RANK', '0')}.jsonl"
        return lm


def _pairs_in(path: Path) -> dict[str, str]:
    """Return the texts of a file and what became of them; a last line that was cut off is left out."""
    found = {}
    for line in path.read_text("utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
            found[str(row["query"])] = str(row["positive"])
        except (ValueError, KeyError, TypeError):
            continue
    return found
