"""Train answer tokens behind texts: their states encode what the frozen model would answer (LLM2Vec-Gen).

BehnamGhader et al. 2026, arXiv 2603.10913: trainable tokens are read after a text. A linear map of their last states
makes a prefix of embeddings, after which the frozen model has to write its own answer to the text; another makes a
vector, which learns a teacher's vector of the answer. Nothing of the model is trained.

Shapes: B texts, T tokens, A tokens of an answer, R answer tokens that are read, D numbers of an embedding, W of a
state, E of a vector, V tokens of the vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from gerund.errors import DataError
from gerund.models.heads import AnswerTokens, ProjectionHead, embedding_width
from gerund.models.light_head import HeadConfig
from gerund.settings.encoder import AnswerConfig
from gerund.training.corpus.teachers import (
    Answer,
    RandomVectors,
    Teacher,
    TeacherVectors,
    model_answers,
    open_teacher,
    read_texts,
    teacher_vectors,
)
from gerund.training.corpus.texts import Mixture
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.losses.distillation import cosine_loss, fit_projection, squared_loss
from gerund.training.losses.vocabulary import head_of, token_loss
from gerund.training.objectives.base import (
    VALIDATION_SEED,
    Batch,
    Batches,
    Context,
    Objective,
    TokenLosses,
    padded,
    text_batch,
)
from gerund.training.objectives.settings import GenConfig
from gerund.training.run_folder import announce

RECONSTRUCTION, ALIGNMENT = "reconstruction", "alignment"
# Rows of the table of embeddings that tell how large embeddings are.
_SAMPLE = 1024
_FIT_TOGETHER = 32


@dataclass(frozen=True)
class AnsweredTexts:
    """Texts with the model's answers, and the teacher's vectors of these."""

    texts: Sequence[str]
    answers: Sequence[Answer]
    vectors: "TeacherVectors | RandomVectors"

    def __len__(self) -> int:
        return len(self.texts)


def prepare(context: Context, config: GenConfig) -> Objective:
    """Return batches of answered texts, and both losses with what they train."""
    formatter = context.formatter(config)
    teacher = open_teacher(config.teacher, config.teacher_prompt)
    model = context.model
    settings = AnswerConfig(config.tokens, config.read, config.prefix, tuple(formatter.before))
    state = model.runtime.state_width
    model.head = ProjectionHead(HeadConfig(state, teacher.dimensions, "linear", space=teacher.space)).train()
    width = embedding_width(model.model)
    answers = AnswerTokens(settings, embedding=width, state=state, vector=teacher.dimensions)
    model.answers = begin(answers, model.model, context.seed(config))
    losses = GenLosses(model.answers, model.head, config)

    def batches(texts: AnsweredTexts, seed: int) -> GenBatches:
        return GenBatches(texts, formatter, config, pad=model.pad, seed=seed)

    seed = context.seed(config)
    validation: dict[str, tuple[Batches, int]] = {}
    if config.validation:
        texts = _answered(context, config, teacher, read_texts(context.files(config.validation)))
        count = context.validation_batches(config, len(texts))
        validation = {config.kind: (batches(texts, seed + VALIDATION_SEED), count)}
    training = batches(_answered(context, config, teacher, _given(context, config, formatter.overhead)), seed)
    if config.fit_head and not context.resuming and context.source.cache is not None:
        fit_projection(model.head, _pooled(context, training, config.fit_head))
    names = [RECONSTRUCTION] * bool(config.reconstruction) + [ALIGNMENT] * bool(config.mse or config.cosine)
    configs: dict[str, Any] = dict.fromkeys(names, config)
    factors = {RECONSTRUCTION: config.reconstruction}
    return Objective(config.kind, training, losses, configs, factors, validation)


def begin(answers: AnswerTokens, model: PreTrainedModel, seed: int) -> AnswerTokens:
    """Give new answer tokens the embeddings of ordinary tokens, and their map the size of what it makes."""
    generator = torch.Generator().manual_seed(seed)
    embed: Any = model.get_input_embeddings()
    drawn = torch.randperm(len(embed.weight), generator=generator)[: max(_SAMPLE, answers.settings.tokens)]
    with torch.no_grad():
        rows_ND = embed(drawn[None].to(embed.weight.device))[0].float().cpu()
        if len(rows_ND) < answers.settings.tokens:  # a vocabulary of very few tokens
            rows_ND = rows_ND.repeat(-(-answers.settings.tokens // len(rows_ND)), 1)
        answers.embeddings.copy_(rows_ND[: answers.settings.tokens])
        size = rows_ND.pow(2).mean().sqrt() / answers.map.in_features**0.5
        answers.map.weight.copy_(size * torch.randn(answers.map.weight.shape, generator=generator))
        answers.map.bias.zero_()
    return answers.train()


@torch.no_grad()
def _pooled(context: Context, batches: "GenBatches", texts: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what the vectors of so many texts are made of ``(B, W)``, and the teacher's vectors ``(B, E)``."""
    count = min(texts, len(batches.texts))
    announce(f"fitting the head to the teacher's vectors of {count:,} answers")
    model, answers = context.model.model.to("cuda" if torch.cuda.is_available() else "cpu"), context.model.answers
    assert answers is not None
    for first in range(0, count, _FIT_TOGETHER):
        batch = batches.answered(range(first, min(first + _FIT_TOGETHER, count)))
        ids_BT, end_B = batch["input_ids"].to(model.device), batch["real"].sum(1).to(model.device)
        yield answers.states(model, ids_BT, end_B).float().mean(1).cpu(), batch["teacher"]


def _given(context: Context, config: GenConfig, overhead: int) -> list[tuple[str, Answer | None]]:
    """Return the texts to train on, with the answers that are given."""
    if config.files:
        return read_texts(context.files(config.files))
    texts = context.source.texts(config, config.length - overhead, context.seed(config))
    if context.source.cache is None:  # a dry run, which reads no text
        return [("a text " * (config.length // 2), Answer("an answer " * (config.answer_length // 2)))] * 2
    rows = (texts.tokens_of(number).tolist() for number in range(len(texts)))
    read = [context.model.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in rows]
    return [(text, None) for text in dict.fromkeys(read) if text]


def _answered(
    context: Context, config: GenConfig, teacher: Teacher, given: Sequence[tuple[str, Answer | None]]
) -> AnsweredTexts:
    """Let the model answer the texts that have no answer, and the teacher read all answers."""
    model, cache = context.model, context.source.cache
    asked = [text for text, answer in given if answer is None]
    written: list[Answer] = []
    if cache is None:  # a dry run, which generates nothing
        written = [Answer("an answer " * (config.answer_length // 2))] * len(asked)
    elif asked:
        written = model_answers(model.model, model.tokenizer, asked, config.answer_length, cache / "answers", announce)
    left = iter(written)
    rows = [(text, next(left) if answer is None else answer) for text, answer in given]
    answered = [(text, answer) for text, answer in rows if answer.text]
    if not answered:
        raise DataError("gen: the model answers none of these texts with anything; give their answers as answer")
    if len(answered) < len(rows):
        announce(f"gen: {len(rows) - len(answered)} texts are left out, which the model answers with nothing")
    texts, answers = [text for text, _ in answered], [answer for _, answer in answered]
    if cache is None:
        return AnsweredTexts(texts, answers, RandomVectors(teacher.dimensions))

    def read(numbers: range) -> list[str]:
        return [answers[number].text for number in numbers]

    return AnsweredTexts(texts, answers, teacher_vectors(teacher, read, len(answered), cache / "teacher", announce))


class GenBatches(Batches):
    """Answered texts in a shuffled order."""

    texts: AnsweredTexts

    def __init__(
        self, texts: AnsweredTexts, formatter: InputFormatter, config: GenConfig, *, pad: int, seed: int
    ) -> None:
        self.texts, self.formatter, self.config, self.pad = texts, formatter, config, pad
        self._order = Mixture([len(texts)], [1.0], seed=seed)

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return a batch.

        ``input_ids`` and ``real`` ``(B, T)`` are the texts, with room for the answer tokens behind the longest;
        ``answer`` and ``answer_real`` ``(B, A)`` the answers, ``teacher`` ``(B, E)`` their vectors.
        """
        return self.answered([self._order.sample(number).item for number in numbers])

    def answered(self, numbers: Sequence[int]) -> Batch:
        """Return texts by their numbers among the texts."""
        texts = [self.formatter.format_text(self.texts.texts[number], self.config.length) for number in numbers]
        batch = text_batch(texts, self.pad)
        for name, fill in (("input_ids", self.pad), ("real", 0)):
            batch[name] = nn.functional.pad(batch[name], (0, self.config.tokens), value=fill)
        answers = [self._ids(self.texts.answers[number]) for number in numbers]
        batch["answer"] = padded(answers, self.pad)
        lengths_B = torch.tensor(list(map(len, answers)))
        batch["answer_real"] = torch.arange(batch["answer"].shape[1]) < lengths_B[:, None]
        batch["teacher"] = torch.from_numpy(self.texts.vectors.rows(numbers))
        return batch

    def _ids(self, answer: Answer) -> list[int]:
        """Return the tokens of an answer; with its end, where it came to one and there is room."""
        tokenizer = self.formatter.tokenizer
        ids: list[int] = tokenizer(answer.text, add_special_tokens=False, verbose=False)["input_ids"]
        if answer.is_whole and tokenizer.eos_token_id is not None:
            ids = [*ids, tokenizer.eos_token_id]
        return ids[: self.config.answer_length]


class GenLosses(TokenLosses):
    """``reconstruction``, the cross entropy of the answers by token, and ``alignment``, the distance by text."""

    heads: nn.ModuleDict

    def __init__(self, answers: AnswerTokens, head: ProjectionHead, config: GenConfig) -> None:
        self.heads, self.config = nn.ModuleDict({"answers": answers, "head": head}), config

    def counts(self, batch: Batch) -> dict[str, int]:
        """Return how many tokens the answers have, and how many texts there are."""
        return {RECONSTRUCTION: int(batch["answer_real"].sum()), ALIGNMENT: len(batch["teacher"])}

    def __call__(self, model: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        """Return the summed losses; those of weight 0 are left out."""
        model.eval()  # it answers without dropout, and is not trained
        answers: Any = self.heads["answers"]
        states_BRW = answers.states(model, batch["input_ids"], batch["real"].sum(1))
        vectors_BE = self.heads["head"](states_BRW.float().mean(1))
        losses = {}
        if self.config.reconstruction:
            read = states_BRW if answers.settings.prefix == "states" else vectors_BE
            losses[RECONSTRUCTION] = reconstruction(model, answers.opening(model, read), batch)
        if self.config.mse or self.config.cosine:
            losses[ALIGNMENT] = self._distance(vectors_BE.float(), batch["teacher"]) * len(vectors_BE)
        return losses

    def _distance(self, vectors_BE: Tensor, teacher_BE: Tensor) -> Tensor:
        loss = self.config.mse * squared_loss(vectors_BE, teacher_BE)
        return loss + self.config.cosine * cosine_loss(vectors_BE, teacher_BE) if self.config.cosine else loss


def reconstruction(model: PreTrainedModel, opening_BKD: Tensor, batch: Batch) -> Tensor:
    """Return the summed cross entropy of answers that the model reads after embeddings ``(B, K, D)``."""
    read_BAD = model.get_input_embeddings()(batch["answer"][:, :-1]).to(opening_BKD)
    hidden_BTW = model.base_model(
        inputs_embeds=torch.cat([opening_BKD, read_BAD], dim=1), use_cache=False
    ).last_hidden_state
    predicting_BAW = hidden_BTW[:, opening_BKD.shape[1] - 1 :]
    head, parameters = head_of(model)
    real_BA = batch["answer_real"]
    return token_loss(head, predicting_BAW[real_BA], batch["answer"][real_BA], parameters=parameters)
