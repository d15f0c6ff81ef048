"""Contrastive objectives: InfoNCE on pairs from files, SimCSE, SSCL by altered texts, and CoSENT on scored pairs.

A batch has the groups ``query``, ``positive`` and, with hard negatives, ``negative``. A query's negatives are
the positives of all other queries and all hard negatives, those of other processes included; a text that is the
same as its positive or as the query itself is none, and neither is one that overlaps its positive, where places are
known.

Scored pairs learn the order of their scores, as by ``CoSENTLoss`` of sentence-transformers. With ``distill`` before it
in a recipe, CoSENT trains that objective's head too; else the head of the base, where it has one.

SSCL pairs a text with an altered text of the same meaning (MAGNET, section 3.2.2). The paper alters texts with a
paraphrasing model; a file of such pairs may be given. Without one, words are left out, swapped and cropped (after EDA,
Wei and Zou 2019), or infilled by the base itself. Neither needs a second model.

Shapes: B pairs, N texts of a batch, D dimensions.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self
from zlib import crc32

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedTokenizerBase

from gerund.entry import load
from gerund.errors import ConfigError, DataError, TextError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.infill import BLANK
from gerund.inference.tokens import Tokens
from gerund.language_model import LanguageModel
from gerund.seq2seq_model import Seq2SeqModel
from gerund.settings.sampling import Sampling
from gerund.training.corpus.pairs import (
    Example,
    Examples,
    SameTaskExamples,
    ScoredPair,
    read_examples,
    read_scored_pairs,
)
from gerund.training.corpus.texts import Mixture, Texts
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.losses.contrastive import batch_info_nce, cosent, ordered
from gerund.training.losses.distillation import prefixes
from gerund.training.losses.vectors import LowerStates, VectorEncoder
from gerund.training.objectives.base import Batch, Batches, Context, Objective, PairLosses, row_generator, text_batch
from gerund.training.objectives.sections import ObjectiveConfig, PairFiles
from gerund.training.objectives.settings import (
    INSTRUCTION,
    ContrastiveConfig,
    CosentConfig,
    SimcseConfig,
    Similarity,
    SsclConfig,
    SupervisedConfig,
)
from gerund.training.processes import gather_numbers, gather_rows


def prepare_examples(context: Context, config: SupervisedConfig) -> Objective:
    """Return batches of examples from files, and InfoNCE."""
    examples = _examples(context, config)
    batches = ExampleBatches.of(context, config, examples, prompts=(config.query_prompt, config.document_prompt))
    if config.pairs.instruction is not None:
        prompt = config.query_prompt or ""
        # All of them now, so that what cannot be formatted is an error before anything is trained.
        batches.by_instruction = {
            text: context.formatter(config, prompt.replace(INSTRUCTION, text) if text.strip() else "")
            for text in {example.instruction for example in examples.examples}
        }
    return Objective(config.kind, batches, ContrastiveLosses.of(context, config), {config.kind: config})


def _examples(context: Context, config: SupervisedConfig) -> Examples | SameTaskExamples:
    examples = read_pair_files(context, config.pairs, config.pairs.instruction, config.pairs.task)
    seed, negatives = context.seed(config), config.hard_negatives
    if config.same_task:
        return SameTaskExamples(examples, seed=seed, batch_size=config.batch_size, hard_negatives=negatives)
    return Examples(examples, seed=seed, hard_negatives=negatives)


def read_pair_files(
    context: Context, pairs: PairFiles, instruction: str | None = None, task: str | None = None
) -> list[Example]:
    """Return the examples of all files, each with its task: what a column says, or its file."""
    columns = {"query": pairs.query, "positive": pairs.positive, "negatives": pairs.negatives}
    return [
        replace(example, task=example.task or str(path))
        for path in context.files(pairs.files)
        for example in read_examples([path], **columns, instruction=instruction, task=task)
    ]


def prepare_simcse(context: Context, config: SimcseConfig) -> Objective:
    """Return batches of texts with themselves, and InfoNCE under dropout (Gao et al. 2021; LLM2Vec's second stage)."""
    group, formatter = TextGroup.of(context), context.formatter(config)
    losses = ContrastiveLosses.of(context, config, dropout=config.dropout)
    return context.text_objective(
        config.kind,
        config,
        lambda texts, _seed: SimcseBatches(texts, formatter, group),
        losses,
        overhead=formatter.overhead,
        validate=False,  # without dropout both views are the same, so validation says nothing
    )


class TextGroup:
    """Makes formatted texts into the tensors of one group."""

    def __init__(self, runtime: EncoderRuntime, pad: int) -> None:
        self.runtime, self.pad = runtime, pad

    @classmethod
    def of(cls, context: Context) -> "TextGroup":
        """Return the groups of a model that is trained."""
        return cls(context.model.runtime, context.model.pad)

    def __call__(self, texts: Sequence[Tokens]) -> Batch:
        """Return ``input_ids``, ``real`` and ``pooled`` (B, T), and ``identity`` (B,), equal for equal texts."""
        batch = text_batch(texts, self.pad)
        position_T = torch.arange(batch["real"].shape[1])
        first_B = torch.tensor([self.runtime.pool_from(text) for text in texts])
        batch["pooled"] = batch["real"] & (position_T >= first_B[:, None])
        batch["identity"] = self.identities([self._without_prompt(text) for text in texts])
        return batch

    @staticmethod
    def identities(texts: Sequence[str]) -> Tensor:
        """Return a number for each text ``(B,)``, the same for the same text."""
        digests = [hashlib.blake2b(text.strip().encode(errors="replace"), digest_size=8).digest() for text in texts]
        return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests])

    def _without_prompt(self, text: Tokens) -> str:
        """Return a text without its prompt, so that a query and a document may be the same text.

        Characters and not tokens: after a prompt the first word has other ones, with the space before it.
        """
        characters: str = self.runtime.tokenizer.decode(
            text.ids[text.text_from :], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return characters


@dataclass(eq=False)
class ExampleBatches(Batches):
    """Examples in a shuffled order, with formatters for queries and for positives and negatives.

    ``by_instruction`` has what formats the queries of each instruction, instead of ``queries``; it may be empty.
    """

    texts: Examples | SameTaskExamples
    queries: InputFormatter
    documents: InputFormatter
    group: TextGroup
    length: int
    by_instruction: dict[str, InputFormatter] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        context: Context,
        config: ObjectiveConfig,
        examples: Examples | SameTaskExamples,
        prompts: tuple[str | None, str | None] = (None, None),
    ) -> "ExampleBatches":
        """Return batches of examples, for the settings of an objective."""
        queries, documents = (context.formatter(config, prompt) for prompt in prompts)
        return cls(examples, queries, documents, TextGroup.of(context), length=config.length)

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return the groups ``query``, ``positive`` and, where examples have any, ``negative``."""
        rows = self.read(numbers)
        groups = {
            "query": [
                self.by_instruction.get(row.instruction, self.queries).format_text(row.query, self.length)
                for row in rows
            ],
            "positive": [self.documents.format_text(row.positive, self.length) for row in rows],
            "negative": [self.documents.format_text(text, self.length) for row in rows for text in row.negatives],
        }
        return {name: self.group(texts) for name, texts in groups.items() if texts}


@dataclass(eq=False)
class SimcseBatches(Batches):
    """Every text twice."""

    texts: Texts
    formatter: InputFormatter
    group: TextGroup

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive`` with the same texts; dropout makes them differ."""
        texts = [self.formatter.format(text) for text in self.read(numbers)]
        batch = self.group(texts)
        return {"query": batch, "positive": dict(batch)}


class ContrastiveLosses(PairLosses):
    """InfoNCE over the vectors of a batch.

    ``projection`` is the size of a linear head after the pooled state. Without ``in_batch`` only the group
    ``negative`` has negatives. ``dropout`` is that of the attention probabilities; None leaves the model's.
    """

    matryoshka: Sequence[int] = ()

    def __init__(
        self,
        runtime: EncoderRuntime,
        *,
        temperature: float,
        similarity: Similarity,
        projection: int | None = None,
        in_batch: bool = True,
        dropout: float | None = None,
        below: LowerStates | None = None,
    ) -> None:
        self.heads = VectorEncoder(runtime, projection=projection, dropout=dropout, below=below)
        self.temperature, self.similarity, self.in_batch = temperature, similarity, in_batch

    @classmethod
    def of(cls, context: Context, config: ContrastiveConfig, *, dropout: float | None = None) -> Self:
        """Return the losses of a config, on the model's head where it has one and the config has no projection."""
        model, head = context.model, context.model.head
        losses = cls(
            model.runtime,
            temperature=config.temperature,
            similarity=config.similarity,
            projection=config.projection,
            dropout=dropout,
            below=model.below,
        )
        if head is not None and config.projection is None:
            losses.heads.projection = head
        width = model.runtime.state_width if head is None else head.settings.dimensions
        if max(config.matryoshka, default=0) > width:
            raise ConfigError(f"{config.kind}: matryoshka {max(config.matryoshka)}, and vectors have {width} numbers")
        losses.matryoshka = config.matryoshka
        return losses

    @property
    def projection(self) -> nn.Module:
        """What makes a pooled state into a vector; the identity where nothing does."""
        return self.heads.projection

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the mean InfoNCE of the queries (MAGNET, equation 3), and how many are right."""

        def loss_of(vectors_NE: Tensor) -> tuple[Tensor, int]:
            return batch_info_nce(
                vectors_NE,
                [group["identity"] for group in batch.values()],
                places=[group["place"] for group in batch.values()] if "place" in batch["query"] else None,
                temperature=self.temperature,
                similarity=self.similarity,
                in_batch=self.in_batch,
                gather=gather,
            )

        return self.nested(loss_of, vectors_ND)

    def nested(self, loss_of: Callable[[Tensor], tuple[Tensor, int]], vectors_ND: Tensor) -> tuple[Tensor, int]:
        """Return the mean loss over all nested sizes, and how many queries whole vectors get right."""
        results = [loss_of(vectors_ND[:, :size]) for size in prefixes(vectors_ND.shape[1], self.matryoshka)]
        loss = sum((loss for loss, _ in results[1:]), start=results[0][0]) / len(results)
        return loss, results[0][1]


def prepare_cosent(context: Context, config: CosentConfig) -> Objective:
    """Return batches of scored pairs, and CoSENT."""
    pairs = read_scored_pairs(context.files(config.pairs.files), **config.pairs.model_dump(exclude={"files"}))
    if len({pair.score for pair in pairs}) < 2:
        raise DataError("cosent: every pair has the same score, so there is no order to learn")
    formatter, group, seed = context.formatter(config), TextGroup.of(context), context.seed(config)
    batches = ScoredBatches(pairs, formatter, group, length=config.length, seed=seed)
    encoder = VectorEncoder(context.model.runtime, below=context.model.below)
    if context.model.head is not None:
        encoder.projection = context.model.head
    return Objective(config.kind, batches, CosentLosses(encoder, config.temperature), {config.kind: config})


class ScoredBatches(Batches):
    """Scored pairs in shuffled epochs."""

    def __init__(
        self, pairs: Sequence[ScoredPair], formatter: InputFormatter, group: TextGroup, *, length: int, seed: int
    ) -> None:
        self.texts, self.formatter, self.group, self.length = pairs, formatter, group, length
        self._order = Mixture([len(pairs)], [1.0], seed=seed)

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive``, the first and second texts; the first has ``score`` (B,)."""
        pairs = [self.texts[self._order.sample(number).item] for number in numbers]
        groups = {
            "query": self._group([pair.text1 for pair in pairs]),
            "positive": self._group([pair.text2 for pair in pairs]),
        }
        groups["query"]["score"] = torch.tensor([pair.score for pair in pairs])
        return groups

    def _group(self, texts: Sequence[str]) -> Batch:
        return self.group([self.formatter.format_text(text, self.length) for text in texts])


class CosentLosses(PairLosses):
    """CoSENT over the vectors of a batch."""

    def __init__(self, encoder: VectorEncoder, temperature: float) -> None:
        self.heads, self.temperature = encoder, temperature

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, float]:
        """Return the loss of all pairs, and the share of them in the order of the scores times this process's pairs."""
        first_BD, second_BD = vectors_ND.float().chunk(2)
        cosines_B, scores_B = functional.cosine_similarity(first_BD, second_BD), batch["query"]["score"]
        pairs = len(cosines_B)
        # Every process has the loss of all pairs, of which its own rows take their part of the gradient.
        cosines_B, scores_B = gather_rows(cosines_B[:, None], gather)[0][:, 0], gather_numbers(scores_B, gather)
        loss = cosent(cosines_B, scores_B, temperature=self.temperature)
        return loss, pairs * ordered(cosines_B, scores_B).item()


# A few words at a time keep what a text says better than whole clauses.
_LONGEST_GAP = 4


def prepare_sscl(context: Context, config: SsclConfig) -> Objective:
    """Return batches of texts with paraphrases or altered copies, and InfoNCE."""
    losses = ContrastiveLosses.of(context, config)
    if config.pairs is not None:
        examples = Examples(read_pair_files(context, config.pairs), seed=context.seed(config))
        return Objective(config.kind, ExampleBatches.of(context, config, examples), losses, {config.kind: config})
    group, formatter = TextGroup.of(context), context.formatter(config)
    base = context.recipe.model.base
    rewriter = Rewriter(base, config.rewritten, context.source.cache) if config.rewritten and base else None
    return context.text_objective(
        config.kind,
        config,
        lambda texts, seed: AlteredBatches(texts, formatter, group, context.model.tokenizer, config, seed, rewriter),
        losses,
        overhead=formatter.overhead,
    )


@dataclass(eq=False)
class AlteredBatches(Batches):
    """Every text with an altered copy of it."""

    texts: Texts
    formatter: InputFormatter
    group: TextGroup
    tokenizer: PreTrainedTokenizerBase
    config: SsclConfig
    seed: int
    rewriter: "Rewriter | None" = None

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return the groups ``query`` and ``positive``."""
        queries, positives = [], []
        for number in numbers:
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

    def _rewritten(self, lm: LanguageModel | Seq2SeqModel, text: str) -> str:
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

    def _opened(self) -> LanguageModel | Seq2SeqModel:
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
