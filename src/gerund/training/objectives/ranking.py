"""Train on ranked lists: token vectors for late interaction, and a reranker, that score documents as a teacher does.

A list is a query, documents and a score of each. The loss is the divergence of the softmax of the student's scores from
that of the teacher's (Santhanam et al. 2022, ColBERTv2). ``late`` scores by the MaxSim of token vectors, and has beside
it the cross entropy of the best document against all documents of the other lists in the batch. In ``pointwise`` the
model reads a query and a document together, by ``scoring/reranker.py``, and a linear layer scores its last state. Its
adapter and layer are saved beside the model's own adapters, which encode, infill and score as before.

Lists are read from files or made of raw texts. Then a query is a sentence of a text, which asks for its rest, or a
question that the model writes to it; BM25 finds other texts like it, and the base model's lift says how relevant each
is. Questions and scores are cached as they are made: an interrupted run continues where it was, and another run on the
same texts and model makes none again.

Shapes: Q lists, C documents of a list, N texts or pairs of a batch, T tokens, D dimensions of a state, E of a token
vector.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from gerund.attention.layouts import decoder_layers
from gerund.data.files import checked_text, field_of
from gerund.data.passages import sentence_bounds
from gerund.data.tables import json_lines
from gerund.errors import ConfigError, DataError, TextError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.generate.reproducibility import evaluation_mode
from gerund.inference.text_ids import text_ids
from gerund.jobs.files import write_atomic
from gerund.language_model import LanguageModel
from gerund.models.fingerprint import describe_files
from gerund.models.heads import LateHead
from gerund.models.reranker_folder import ScoreLayer, write_reranker
from gerund.models.weights import weight_files
from gerund.progress import progress, say_once
from gerund.retrieval.documents import Chunk, Chunking
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.questions import PASSAGES_AT_ONCE, PLACE, questions_to
from gerund.retrieval.store import IndexMetadata, KeywordQuery
from gerund.scoring.query_likelihood import QueryLikelihood, forget
from gerund.scoring.reranker import Reranker
from gerund.settings.encoder import EncoderConfig, LateConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.ranking import RerankerConfig
from gerund.training.corpus.texts import Mixture
from gerund.training.losses.vectors import VectorEncoder
from gerund.training.objectives.base import Batch, Batches, Context, Objective, PairLosses, text_batch
from gerund.training.objectives.contrastive import TextGroup
from gerund.training.objectives.settings import LateObjectiveConfig, PointwiseConfig, RankedListsConfig
from gerund.training.processes import process_index
from gerund.training.run_folder import announce
from gerund.training.sharding import copy_of

LISTS = "lists.jsonl"
"""The file, in a run's folder, of the lists that were made of texts."""
# Raised whenever questions or scores of the same texts become others.
_FORMAT = 2
# Near the largest number of 32 bits.
_TOO_LARGE = 1e38
_FEWEST_WORDS, _LEAST_LEFT = 4, 40


@dataclass(frozen=True)
class RankedList:
    """A query with documents and how relevant each is, by a teacher."""

    query: str
    documents: list[str]
    scores: list[float]


class ShuffledLists:
    """Lists in shuffled epochs, each with its best document first and ``candidates - 1`` others at random.

    Row ``i`` is a pure function of the seed and ``i``.
    """

    def __init__(self, lists: Sequence[RankedList], candidates: int, *, seed: int) -> None:
        self.lists, self.candidates, self.seed = lists, candidates, seed
        self._order = Mixture([len(lists)], [1.0], seed=seed)

    def __len__(self) -> int:
        """Return how many lists there are."""
        return len(self.lists)

    def row(self, number: int) -> RankedList:
        """Return list ``number`` of the training."""
        ranked = self.lists[self._order.sample(number).item]
        best = int(np.argmax(ranked.scores))
        others = [place for place in range(len(ranked.documents)) if place != best]
        shuffled = np.random.default_rng([self.seed, number]).permutation(others)
        places = [best, *shuffled[: self.candidates - 1].tolist()]
        documents, scores = ([column[place] for place in places] for column in (ranked.documents, ranked.scores))
        return RankedList(ranked.query, documents, scores)


def ranked_lists(context: Context, config: RankedListsConfig, length: int) -> list[RankedList]:
    """Return the lists of an objective's files, or made of the recipe's texts of at most ``length`` tokens.

    Raises:
        ConfigError: a list has fewer documents than a step reads.
        DataError: a file is broken, or no query could be made of the texts.
    """
    lists = read_lists(context.files(config.files)) if config.files else _made(context, config, length)
    fewest = min(len(ranked.documents) for ranked in lists)
    if fewest < config.candidates:
        raise ConfigError(
            f"{config.kind}: candidates {config.candidates}, and a list has {fewest} documents; set fewer"
        )
    return lists


def read_lists(paths: Sequence[Path]) -> list[RankedList]:
    """Read lists from .jsonl files, whose lines have ``query``, ``documents`` and ``scores``."""
    lists = [_list(row, where) for path in paths for where, row in json_lines(path)]
    if not lists:
        raise DataError(f"{', '.join(map(str, paths))}: no lists in there")
    return lists


def _list(row: Mapping[str, Any], where: str) -> RankedList:
    query, documents, scores = (field_of(row, name, where) for name in ("query", "documents", "scores"))
    query = checked_text(query, where, "query")
    if not query.strip() or not isinstance(documents, list) or len(documents) < 2:
        raise DataError(f"{where}: a list has a query and two documents at least")
    texts = [checked_text(text, where, "documents") for text in documents]
    if not all(text.strip() for text in texts):
        raise DataError(f"{where}: a document is empty")
    is_listed = isinstance(scores, list) and len(scores) == len(texts)
    if not is_listed or not all(type(score) in (int, float) and abs(score) < _TOO_LARGE for score in scores):
        raise DataError(f"{where}: scores must be {len(texts)} numbers, one for each document")
    return RankedList(query, texts, [float(score) for score in scores])


def _made(context: Context, config: RankedListsConfig, length: int) -> list[RankedList]:
    """Return lists of the recipe's texts; a resumed run reads those that were made."""
    texts = context.source.texts(config, length, context.seed(config))
    cache = context.source.cache
    if cache is None:  # a dry run, which reads no text
        return [RankedList(f"query {number}", ["a document " * (length // 4)] * config.candidates,
                           list(range(config.candidates))) for number in range(2)]  # fmt: skip
    path = context.recipe.output / LISTS
    if context.resuming and path.is_file():
        return read_lists([path])
    decode_ids = context.model.tokenizer.decode
    whole = [decode_ids(texts.tokens_of(number).tolist(), skip_special_tokens=True) for number in range(len(texts))]
    lists = _Maker(context, config, [text.strip() for text in whole], cache).lists()
    if process_index() == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "".join(json.dumps(asdict(ranked), ensure_ascii=False) + "\n" for ranked in lists))
    return lists


class _Maker:
    """Makes queries of texts, and has the base model say how relevant texts are to them."""

    def __init__(self, context: Context, config: RankedListsConfig, texts: Sequence[str], cache: Path) -> None:
        self.model, self.config, self.texts, self.cache = context.model, config, texts, cache
        self.seed = context.seed(config)
        # Of the lists that are made, each text asks once at most.
        self._order = np.random.default_rng(self.seed).permutation(len(texts)).tolist()
        digest = hashlib.blake2b(digest_size=8)
        for part in (str(_FORMAT), str(self.seed), self._base(), *texts):
            digest.update(f"{len(part)}\0{part}".encode(errors="replace"))
        self._key = digest.hexdigest()

    def lists(self) -> list[RankedList]:
        """Return scored lists: of mined and of written queries, half of each where there are both."""
        count, kind = self.config.lists, self.config.questions
        mined = {"mined": count, "both": count - count // 2}.get(kind, 0)
        adapter = self.model.adapter
        # The base's own adapter, which may be trained further, neither writes nor scores.
        with evaluation_mode(self.model.model), nullcontext() if adapter is None else adapter.disable_adapter():
            asked = [*self._taken(self._mined(), mined), *self._taken(self._written(), count - mined)]
            if not asked:
                raise DataError(
                    f"{self.config.kind}: no text has two sentences, of which one could ask for the other; name lists "
                    "as files"
                    if kind == "mined"
                    else f"{self.config.kind}: the model wrote no question that finds its text by words; take an "
                    "instruction-tuned model, such as smollm2, or questions: mined"
                )
            return self._scored(asked)

    def _base(self) -> str:
        """Return what identifies the weights that write and score: those of the base, without an adapter."""
        source = self.model.source
        if source is None:
            return f"a new model of {len(decoder_layers(self.model.model))} layers"
        return f"{source.name} {describe_files(weight_files(source))}"

    def _taken(self, queries: Iterator[tuple[int, str, str]], count: int) -> Iterator[tuple[str, list[str]]]:
        """Yield that many queries with the text that each was made of and others that BM25 finds."""
        if not count:
            return
        left = count
        for number, query, rest in queries:
            matches = self._store.words(KeywordQuery(query), self.config.candidates)
            others = [chunk.text for chunk, _ in matches if chunk.source != str(number)]
            if len(others) >= self.config.candidates - 1:
                yield query, [rest, *others[: self.config.candidates - 1]]
                left -= 1
                if not left:
                    return

    @cached_property
    def _store(self) -> MemoryStore:
        store = MemoryStore()
        store.create(IndexMetadata("", "", 1, "", Chunking()))
        chunks = [Chunk(str(at), 0, len(text), text, 0, 0, "", "", "", "") for at, text in enumerate(self.texts)]
        store.replace([chunk.source for chunk in chunks], chunks, np.ones((len(chunks), 1), dtype=np.float32))
        return store

    def _mined(self) -> Iterator[tuple[int, str, str]]:
        """Yield a text's number, a sentence of it, and the rest."""
        rng = np.random.default_rng([self.seed, 1])
        for number in self._order:
            text = self.texts[number]
            bounds = sentence_bounds(text)
            usable = [(start, end) for start, end in bounds if len(text[start:end].split()) >= _FEWEST_WORDS]
            if len(bounds) < 2 or not usable:
                continue
            start, end = usable[int(rng.integers(len(usable)))]
            query, rest = " ".join(text[start:end].split()), f"{text[:start]} {text[end:]}".strip()
            if len(rest) >= _LEAST_LEFT:
                yield number, query, rest

    def _written(self) -> Iterator[tuple[int, str, str]]:
        """Yield a text's number, a question that the model wrote to it and by which words find it, and the text."""
        known = _Lines(self.cache / f"questions-{self._key}.jsonl")
        order = [number for number in self._order if len(self.texts[number]) >= _LEAST_LEFT]
        for first in range(0, len(order), PASSAGES_AT_ONCE):
            numbers = order[first : first + PASSAGES_AT_ONCE]
            asked = known.get(first, partial(self._questions, numbers))
            announce(f"{self.config.kind}: questions to {first + len(numbers)} of {len(order)} texts")
            for number, questions in zip(numbers, asked, strict=True):
                for question in questions:
                    best = [chunk.source for chunk, _ in self._store.words(KeywordQuery(question), PLACE)]
                    if str(number) in best:
                        yield number, question, self.texts[number]
                        break

    def _questions(self, numbers: Sequence[int]) -> list[list[str]]:
        lm = LanguageModel(self.model.model, self.model.tokenizer, EncoderConfig(AttentionPlan("causal")))
        return questions_to(lm, [self.texts[at] for at in numbers], self.seed)

    def _scored(self, asked: Sequence[tuple[str, list[str]]]) -> list[RankedList]:
        """Return lists with the lift that each document gives to its query."""
        texts = "\0".join(text for query, documents in asked for text in (query, *documents))
        key = hashlib.blake2b(texts.encode(errors="replace"), digest_size=8).hexdigest()
        known = _Lines(self.cache / f"lists-{self._key}-{key}.jsonl")
        announce(f"{self.config.kind}: {len(asked)} lists of {self.config.candidates} texts are labeled by lift")
        model, tokenizer, lists = self.model.model, self.model.tokenizer, []
        try:
            with progress(len(asked), "labeling", show=None) as advance:
                for place, (query, documents) in enumerate(asked):
                    scores = known.get(place, partial(_lift, model, tokenizer, query, documents))
                    lists.append(RankedList(query, documents, scores))
                    advance(1)
        finally:
            forget(model)
        return lists


def _lift(model: Any, tokenizer: Any, query: str, documents: Sequence[str]) -> list[float]:
    values: list[float] = QueryLikelihood(model, tokenizer, query, "lift")(documents).tolist()
    return values


class _Lines:
    """Results by number, in a file to which each new one is added; an interrupted run, or another one, reads them.

    Two runs may write at the same time: each result is a line ``[number, result]`` of one write, in any order.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        content = path.read_bytes() if path.is_file() else b""
        # The end of an interrupted run is no line; the next one begins after it.
        self._torn = bool(content) and not content.endswith(b"\n")
        self._known = dict[int, Any]()
        for line in content.splitlines():
            with suppress(ValueError):
                number, result = json.loads(line)
                self._known[number] = result

    def get(self, number: int, make: Callable[[], Any]) -> Any:
        """Return the result of a number: the one in the file, else a new one."""
        if number not in self._known:
            self._known[number] = make()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                file.write(f"{chr(10) * self._torn}{json.dumps([number, self._known[number]])}\n".encode())
            self._torn = False
        return self._known[number]


def prepare_late(context: Context, config: LateObjectiveConfig) -> Objective:
    """Return batches of lists, and the loss on them."""
    formatters = [context.formatter(config, marker) for marker in (config.query_marker, config.document_marker)]
    lists = ranked_lists(context, config, config.length - formatters[1].overhead)
    encoder = TokenVectorEncoder(context.model.runtime, config.dimensions, config.length)
    shuffled = ShuffledLists(lists, config.candidates, seed=context.seed(config))
    batches = ListBatches(shuffled, formatters, TextGroup.of(context), config)

    def extra_files() -> list[Callable[[Path], None]]:
        [projection_ED] = (copy_of(part).numpy() for part in encoder.projection.parameters())
        settings = LateConfig(config.query_marker, config.document_marker, counts=config.counts)
        return [LateHead(settings, projection_ED).save]

    losses = LateLosses(encoder, config)
    return Objective(config.kind, batches, losses, {config.kind: config}, extra_files=extra_files)


class ListBatches(Batches):
    """Queries and their documents, and which of their tokens have vectors."""

    def __init__(
        self, lists: ShuffledLists, formatters: Sequence[Any], group: TextGroup, config: LateObjectiveConfig
    ) -> None:
        self.texts, self.config, self.group = lists, config, group
        self._queries, self._documents = formatters
        self._special = torch.tensor(sorted(group.runtime.tokenizer.all_special_ids), dtype=torch.long)

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return the group ``query`` with the teacher's scores ``teacher`` (Q, C), and the group ``document``."""
        rows, length = self.read(numbers), self.config.length
        queries = [self._queries.format_text(row.query, length) for row in rows]
        documents = [self._documents.format_text(text, length) for row in rows for text in row.documents]
        groups = {"query": self.group(queries), "document": self.group(documents)}
        for group in groups.values():
            if self.config.counts == "all":
                group["pooled"] = group["real"].clone()
            else:
                group["pooled"] &= ~torch.isin(group["input_ids"], self._special)
        groups["query"]["teacher"] = torch.tensor([row.scores for row in rows], dtype=torch.float32)
        return groups


class TokenVectorEncoder(VectorEncoder):
    """Reads texts as ``encode_multi`` does, with gradients; a text has ``length`` places, zeros where no token is."""

    def __init__(self, runtime: EncoderRuntime, dimensions: int, length: int) -> None:
        super().__init__(runtime)
        self.dimensions, self.length = dimensions, length
        self.projection = nn.Linear(runtime.state_width, dimensions, bias=False)
        nn.init.orthogonal_(self.projection.weight)

    def vectors(self, hidden_BTD: Tensor, part: Batch) -> Tensor:
        """Return the token vectors ``(B, length E)``, of length 1, one place after the other."""
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            vectors_BTE = functional.normalize(self.projection(hidden_BTD.float()), dim=-1)
        vectors_BTE = vectors_BTE * part["pooled"][:, :, None]
        return functional.pad(vectors_BTE, (0, 0, 0, self.length - vectors_BTE.shape[1])).flatten(1)


class LateLosses(PairLosses):
    """The divergence from the teacher's scores, and in-batch negatives."""

    heads: TokenVectorEncoder

    def __init__(self, encoder: TokenVectorEncoder, config: LateObjectiveConfig) -> None:
        self.heads, self.config = encoder, config

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the mean loss of the lists, and of how many the student's best document is the teacher's.

        Documents of other processes are no negatives.
        """
        del gather
        teacher_QC = batch["query"]["teacher"]
        lists, candidates = teacher_QC.shape
        vectors_NTE = vectors_ND.float().unflatten(1, (self.heads.length, self.heads.dimensions))
        scores_QN = maxsim_all(vectors_NTE[:lists], vectors_NTE[lists:])
        own_QC = scores_QN.unflatten(1, (lists, candidates))[torch.arange(lists), torch.arange(lists)]
        loss = divergence(own_QC / self.config.temperature, teacher_QC, self.config.teacher_temperature)
        best_Q = teacher_QC.argmax(1)
        if self.config.in_batch and lists > 1:
            loss = loss + self.config.in_batch * self._against_others(scores_QN, best_Q, batch)
        return loss, int((own_QC.argmax(1) == best_Q).sum())

    def _against_others(self, scores_QN: Tensor, best_Q: Tensor, batch: Mapping[str, Batch]) -> Tensor:
        """Return the cross entropy of each best document against the documents of other lists; equal texts are none."""
        lists = len(scores_QN)
        candidates = scores_QN.shape[1] // lists
        places_Q = torch.arange(lists, device=scores_QN.device) * candidates + best_Q
        ids_N = batch["document"]["identity"]
        own_QN = (
            torch.arange(scores_QN.shape[1], device=scores_QN.device)[None] // candidates
            == torch.arange(lists, device=scores_QN.device)[:, None]
        )
        left_out_QN = (own_QN | (ids_N[None] == ids_N[places_Q][:, None])).scatter(1, places_Q[:, None], False)
        return functional.cross_entropy((scores_QN / self.config.temperature).masked_fill(left_out_QN, -1e9), places_Q)


def maxsim_all(queries_QTE: Tensor, documents_NTE: Tensor) -> Tensor:
    """Return the MaxSim of each query and each document ``(Q, N)``; a vector of zeros is no token.

    >>> one = torch.eye(2)[None]
    >>> round(maxsim_all(one, torch.tensor([[[0.6, 0.8], [0.0, 0.0]]])).item(), 3)
    0.7
    """
    cosines_QNTS = torch.einsum("qte,nse->qnts", queries_QTE, documents_NTE)
    cosines_QNTS = cosines_QNTS.masked_fill(~documents_NTE.any(-1)[None, :, None], -1.0)
    real_QT = queries_QTE.any(-1)
    best_QNT = cosines_QNTS.amax(-1) * real_QT[:, None]
    return best_QNT.sum(-1) / real_QT.sum(-1).clamp(min=1)[:, None]


def divergence(scores_QC: Tensor, teacher_QC: Tensor, temperature: float) -> Tensor:
    """Return the mean divergence of each list's softmax from that of the teacher's z-scores, 0 where all are equal."""
    apart_QC = teacher_QC - teacher_QC.mean(1, keepdim=True)
    standardized_QC = apart_QC / apart_QC.square().mean(1, keepdim=True).sqrt().clamp(min=1e-9)
    expected_QC = (standardized_QC / temperature).softmax(1)
    return functional.kl_div(scores_QC.log_softmax(1), expected_QC, reduction="batchmean")


# The document last, so that it is what loses its end where both are too long.
_PIECES = ("Query: {query}\n\nDocument: {document}", "\n\nRelevance:")


def prepare_pointwise(context: Context, config: PointwiseConfig) -> Objective:
    """Return batches of queries with documents, and the loss on their scores."""
    model = context.model
    settings = RerankerConfig("pieces", _pieces(model.tokenizer), activation="Identity", embeds=True)
    reads = Reranker(model.model, model.tokenizer, replace(settings, max_length=config.length))
    lists = _readable(ranked_lists(context, config, config.length), reads)
    encoder = VectorEncoder(reads.runtime, below=model.below)
    layer = encoder.projection = nn.Linear(model.runtime.state_width, 1)
    # Every score begins at 0, so the first steps go by the teacher alone.
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    batches = PairBatches(ShuffledLists(lists, config.candidates, seed=context.seed(config)), reads, model.pad)

    def extra_files() -> list[Callable[[Path], None]]:
        tensors = [copy_of(part) for part in layer.parameters()]
        return [lambda folder: write_reranker(folder, settings), lambda folder: ScoreLayer(*tensors).save(folder)]

    losses = PointwiseLosses(encoder, config)
    return Objective(config.kind, batches, losses, {config.kind: config}, extra_files=extra_files)


def _pieces(tokenizer: Any) -> tuple[str, ...]:
    """Return the pieces of a pair, after a beginning token where the tokenizer puts one before texts."""
    begins = text_ids(tokenizer, "a")[:1] == [tokenizer.bos_token_id]
    first, *others = _PIECES
    return ("{bos}" * begins + first, *others)


def _readable(lists: Sequence[RankedList], reads: Reranker) -> list[RankedList]:
    """Return the lists whose query leaves room for documents."""
    kept = []
    for ranked in lists:
        try:
            list(reads.tokens([(ranked.query, ranked.documents[0])]))
        except TextError:
            continue
        kept.append(ranked)
    if not kept:
        raise DataError("pointwise: every query fills the length, so no document fits next to it; set another length")
    if len(kept) < len(lists):
        say_once(f"pointwise: {len(lists) - len(kept)} queries leave no room for a document, and are left out")
    return kept


class PairBatches(Batches):
    """Lists as pairs of their query with each document."""

    def __init__(self, lists: ShuffledLists, reads: Reranker, pad: int) -> None:
        self.texts, self.reads, self.pad = lists, reads, pad

    def batch_of(self, numbers: range) -> dict[str, Any]:
        """Return the group ``query`` (Q,) with each list's best document, and ``document`` (Q (C - 1),) with others.

        ``teacher`` (Q, C) has the teacher's scores, the best document's first.
        """
        rows = self.read(numbers)
        best = [(row.query, row.documents[0]) for row in rows]
        others = [(row.query, document) for row in rows for document in row.documents[1:]]
        groups = {"query": self._group(best), "document": self._group(others)}
        groups["query"]["teacher"] = torch.tensor([row.scores for row in rows], dtype=torch.float32)
        return groups

    def _group(self, pairs: Sequence[tuple[str, str]]) -> Batch:
        """Return ``input_ids``, ``real`` and ``pooled`` (N, T), which has the last token alone."""
        batch = text_batch(list(self.reads.tokens(pairs)), self.pad)
        lengths_N = batch["real"].sum(1)
        batch["pooled"] = torch.arange(batch["real"].shape[1]) == lengths_N[:, None] - 1
        batch["identity"] = TextGroup.identities(["\0".join(pair) for pair in pairs])
        return batch


class PointwiseLosses(PairLosses):
    """The divergence of the scores from the teacher's."""

    def __init__(self, encoder: VectorEncoder, config: PointwiseConfig) -> None:
        self.heads, self.config = encoder, config

    def compare(self, vectors_ND: Tensor, batch: Mapping[str, Batch], *, gather: bool) -> tuple[Tensor, int]:
        """Return the mean loss of the lists, and in how many the teacher's best document has the highest score."""
        del gather
        teacher_QC = batch["query"]["teacher"]
        lists = len(teacher_QC)
        scores_N = vectors_ND.float()[:, 0]
        scores_QC = torch.cat([scores_N[:lists, None], scores_N[lists:].unflatten(0, (lists, -1))], dim=1)
        loss = divergence(scores_QC, teacher_QC, self.config.teacher_temperature)
        return loss, int((scores_QC[:, :1] > scores_QC[:, 1:]).all(1).sum())
