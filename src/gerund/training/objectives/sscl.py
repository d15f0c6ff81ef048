"""Train SSCL: a text and an altered text with the same meaning are a pair (MAGNET, section 3.2.2).

The paper alters texts with a paraphrasing model; a file of such pairs may be given. Without one, words are left
out, swapped and cropped (after EDA, Wei and Zou 2019), or infilled by the base itself. Neither needs a second model.
"""

import hashlib
import json
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from gerund.entry import load
from gerund.errors import ConfigError, TextError
from gerund.inference.infill.blanks import BLANK
from gerund.inference.tokens import Tokens
from gerund.settings.sampling import Sampling
from gerund.training.corpus.pairs import Examples
from gerund.training.corpus.texts import Texts
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.objectives.base import Batches, Context, Objective, row_generator
from gerund.training.objectives.contrastive import ContrastiveLosses, ExampleBatches, TextGroup, read_pair_files
from gerund.training.objectives.settings import SsclConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from gerund.language_model import LanguageModel
    from gerund.seq2seq_model import Seq2SeqModel


# A few words at a time keep what a text says better than whole clauses.
_LONGEST_GAP = 4


def prepare(context: Context, config: SsclConfig) -> Objective:
    """Return batches of texts with paraphrases or altered copies, and InfoNCE."""
    losses = ContrastiveLosses.of(context, config)
    if config.pairs is not None:
        examples = Examples(read_pair_files(context, config.pairs), seed=context.seed(config))
        return Objective(config.kind, ExampleBatches.of(context, config, examples), losses, {config.kind: config})
    group, formatter = TextGroup.of(context), context.formatter(config)
    base = context.recipe.model.base
    rewriter = Rewriter(base, config.rewritten, context.source.cache) if config.rewritten and base else None
    options: dict[str, Any] = {"tokenizer": context.model.tokenizer, "config": config, "rewriter": rewriter}

    def batches(texts: Any, seed: int) -> Batches:
        return AlteredBatches(texts, formatter, group, seed=seed, **options)

    return context.text_objective(config.kind, config, batches, losses, overhead=formatter.overhead)


class AlteredBatches(Batches):
    """Every text with an altered copy of it."""

    def __init__(
        self,
        texts: Texts,
        formatter: InputFormatter,
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

    def _altered(self, ids: np.ndarray, number: int) -> Tokens | None:
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
    """Rewrites a fraction of a text's words by infilling, the same ones each time.

    What it wrote is kept in a file, so that no text is rewritten twice, by a resumed training either. The model is the
    base (with its adapter for infilling, if any), not the one in training: a text's other version does not depend on
    the step in which it is read. Without a ``cache`` folder nothing is kept.
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
        # The text is the seed, so that it does not matter in which order texts are read.
        sampling = Sampling(temperature=1.0, top_p=0.9, seed=crc32(text.encode()))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".* expansions of .* were found")
            try:
                versions = lm.expand(
                    text.replace(BLANK, ""), 1, fraction=self.fraction, max_tokens=_LONGEST_GAP, sampling=sampling
                )
            except TextError:  # no word in it, or no room for another
                versions = []
        return versions[0] if versions else text

    def _opened(self) -> "LanguageModel | Seq2SeqModel":
        if self._lm is not None:
            return self._lm
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
    result = {}
    for line in path.read_text("utf-8", errors="replace").split("\n"):
        try:
            row = json.loads(line)
            result[str(row["query"])] = str(row["positive"])
        except (ValueError, KeyError, TypeError):
            continue
    return result


# Only neighbors are swapped, so that the meaning survives. Words are split at white space, so a text in a script
# without spaces is one word and is returned unchanged.
def augment(text: str, rng: np.random.Generator, *, deletion: float = 0.1, swap: float = 0.1, crop: float = 1.0) -> str:
    r"""Return another version of a text: cropped, thinned out, then with neighboring words exchanged.

    It is the text's words, at least one, with single spaces between them. ``deletion`` and ``swap`` are probabilities
    per word; no word moves twice. With ``crop`` below 1, a random contiguous stretch is taken first, whose length is
    uniform from this fraction to all words.

    >>> augment("the quick brown fox jumps over the lazy dog by the river", np.random.default_rng(1), crop=0.6)
    'brown fox jumps over the lazy dog the river'
    >>> augment("one  word\nafter another", np.random.default_rng(0), deletion=0, swap=0)
    'one word after another'
    """
    for name, value in (("deletion", deletion), ("swap", swap), ("crop", crop)):
        if not 0 <= value <= 1:
            raise ConfigError(f"{name} is a fraction from 0 to 1, not {value}")
    words = text.split()
    if not words:
        raise TextError("a text without words cannot be augmented")
    return " ".join(_swapped(_thinned(_cropped(words, crop, rng), deletion, rng), swap, rng))


def _cropped(words: list[str], crop: float, rng: np.random.Generator) -> list[str]:
    length = max(1, round(rng.uniform(crop, 1.0) * len(words)))
    start = int(rng.integers(len(words) - length + 1))
    return words[start : start + length]


def _thinned(words: list[str], deletion: float, rng: np.random.Generator) -> list[str]:
    stays = rng.random(len(words)) >= deletion
    if not stays.any():
        stays[rng.integers(len(words))] = True
    return [word for word, stay in zip(words, stays, strict=True) if stay]


def _swapped(words: list[str], swap: float, rng: np.random.Generator) -> list[str]:
    words = list(words)
    swaps = rng.random(len(words)) < swap
    place = 0
    while place < len(words) - 1:
        if swaps[place]:
            words[place : place + 2] = reversed(words[place : place + 2])
            place += 1
        place += 1
    return words
