"""Distillation losses (cosine, squared error, similarity KL), and least-squares token and word vectors of a teacher.

Shapes: B texts of this process, K of all processes, N entries (a row of the table in a text), R rows of the table, E
numbers of a vector.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gerund.errors import ConfigError
from gerund.models.heads import ProjectionHead
from gerund.models.light_head import LONGEST_WORD
from gerund.training.processes import gather_numbers, gather_rows


def cosine_loss(student_BE: Tensor, teacher_BE: Tensor) -> Tensor:
    """Return the mean of one minus the cosine between each text's two vectors.

    >>> cosine_loss(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 1.0]])).item()
    1.0
    """
    return (1 - functional.cosine_similarity(student_BE, teacher_BE, dim=-1)).mean()


def squared_loss(student_BE: Tensor, teacher_BE: Tensor) -> Tensor:
    """Return the mean over texts of the squared distance between the two vectors.

    Of the distance and not of each number, so that its size does not depend on how many numbers there are: for
    vectors of length 1 it is twice the cosine loss.

    >>> squared_loss(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]])).item()
    25.0
    """
    return (student_BE - teacher_BE).pow(2).sum(-1).mean()


def similarity_loss(student_BE: Tensor, teacher_BE: Tensor, *, temperature: float, gather: bool = False) -> Tensor:
    """Return how far the student's view of a batch is from the teacher's.

    Each text's cosines to the other texts of the batch, divided by the temperature, are a distribution over them; the
    loss is the mean Kullback-Leibler divergence of the student's from the teacher's (Fang et al. 2021, SEED; Tejankar
    et al. 2021, ISD). The two need not have as many numbers.

    >>> vectors = torch.eye(3)
    >>> similarity_loss(vectors, 5 * vectors, temperature=0.1).item()
    0.0
    """
    student_BE, teacher_BE = (functional.normalize(rows.float(), dim=-1) for rows in (student_BE, teacher_BE))
    student_KE, first = gather_rows(student_BE, gather)
    teacher_KE = gather_numbers(teacher_BE, gather)
    if len(student_KE) < 2:
        return student_BE.sum() * 0
    rows_B = torch.arange(len(student_BE), device=student_BE.device)
    others_BK = torch.ones(len(student_BE), len(student_KE), dtype=torch.bool, device=student_BE.device)
    others_BK[rows_B, first + rows_B] = False

    def view(own_BE: Tensor, all_KE: Tensor) -> Tensor:
        """Return the logarithm of a distribution over the other texts ``(B, K - 1)``."""
        cosines = (own_BE @ all_KE.T)[others_BK].view(len(own_BE), -1)
        return (cosines / temperature).log_softmax(-1)

    target = view(teacher_BE, teacher_KE)
    return functional.kl_div(view(student_BE, student_KE), target, reduction="batchmean", log_target=True)


def prefixes(width: int, matryoshka: Sequence[int]) -> list[int]:
    """Return how many first numbers of a vector are trained: all of them, and those of a nested loss.

    >>> prefixes(384, [64, 128])
    [384, 128, 64]
    """
    return [width, *sorted((size for size in set(matryoshka) if size < width), reverse=True)]


@torch.no_grad()
def top1_count(student_BE: Tensor, teacher_BE: Tensor) -> int:
    """Return for how many texts the teacher's vector that is nearest to the student's is that of the same text."""
    student_BE, teacher_BE = (functional.normalize(rows.float(), dim=-1) for rows in (student_BE, teacher_BE))
    cosines_BB = student_BE @ teacher_BE.T
    # A text may be there twice.
    return int((cosines_BB.diagonal() >= cosines_BB.amax(1) - 1e-6).sum())


_SEEN = 2
"""Words that are met less often get no vector."""
_WORD = re.compile(r"[^\W_]+")
_WORDS_AT_ONCE = 1024


def fit_head(head: ProjectionHead, batches: Iterable[Mapping[str, Tensor]]) -> None:
    """Fit a head's vectors of tokens, and of the commonest words where it has such, to a teacher's of all texts.

    Batches have ``input_ids``, ``pooled`` and ``teacher``.
    """
    n_tokens = 0 if head.tokens is None else head.tokens.num_embeddings
    texts: list[Tensor] = []
    keys: list[Tensor] = []
    weights: list[Tensor] = []
    fit, count = StaticFit(n_tokens + (head.settings.words or 0), head.settings.dimensions), 0
    for batch in batches:
        ids_BT, pooled_BT = batch["input_ids"], batch["pooled"].bool()
        weight_B = 1 / pooled_BT.sum(1).clamp(min=1)
        text_M, place_M = pooled_BT.nonzero(as_tuple=True)
        if head.tokens is None:
            text_M, place_M = text_M[:0], place_M[:0]
        fit.add(text_M, ids_BT[text_M, place_M], weight_B[text_M], batch["teacher"])
        if head.words is not None:
            text_N, keys_N = head.words.words(ids_BT, pooled_BT)
            texts.append(text_N + count)
            keys.append(keys_N)
            weights.append(weight_B[text_N])
        count += len(ids_BT)
    if head.words is not None:
        chosen_W = _commonest(torch.cat(keys), head.words.keys_W.shape[0])
        head.words.keep(chosen_W, torch.zeros(len(chosen_W), head.settings.dimensions))
        row_N, known_N = head.words.rows(torch.cat(keys))
        fit.add_entries(torch.cat(texts)[known_N], n_tokens + row_N[known_N], torch.cat(weights)[known_N])
    table_RE = fit.solve()
    if head.tokens is not None:
        head.tokens.weight.data.copy_(table_RE[:n_tokens])
    if head.words is not None:
        head.words.keep(head.words.keys_W.clone(), table_RE[n_tokens:])


@torch.no_grad()
def take_words(head: ProjectionHead, texts: Iterable[str], source: ProjectionHead, tokenizer: Any) -> None:
    """Give a head the vectors that another adds for the commonest words of texts, each read by itself.

    ``tokenizer`` is that of the other head's model. Words that it has no vector for get none.

    Raises:
        ConfigError: it has a vector for no word of the texts.
    """
    assert head.words is not None
    assert source.words is not None
    counts = Counter(word for text in texts for word in _WORD.findall(text.lower()) if len(word) <= LONGEST_WORD)
    words = [word for word, _ in counts.most_common()]
    keys, vectors, n_words, n_known = [], [], head.words.keys_W.shape[0], 0
    for first in range(0, len(words), _WORDS_AT_ONCE):
        if n_known >= n_words:
            break
        read = tokenizer([f" {word}" for word in words[first : first + _WORDS_AT_ONCE]], add_special_tokens=False)
        rows = [torch.tensor(ids) for ids in read["input_ids"]]
        ids_BT = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        pooled_BT = torch.arange(ids_BT.shape[1]) < torch.tensor([[len(ids)] for ids in rows])
        text_N, keys_N = source.words.words(ids_BT, pooled_BT)
        known_N = source.words.rows(keys_N)[1] & (torch.bincount(text_N, minlength=len(rows))[text_N] == 1)
        keys.append(keys_N[known_N])
        vectors.append((source.static(ids_BT, pooled_BT) * pooled_BT.sum(1, keepdim=True))[text_N[known_N]])
        n_known += len(keys[-1])
    if not n_known:
        raise ConfigError("distill.words_of: that model has a vector for no word of these texts")
    keys_W, vectors_WE = torch.cat(keys)[:n_words], torch.cat(vectors)[:n_words]
    missing = n_words - len(keys_W)
    head.words.keep(torch.cat([keys_W, _no_words(missing)]), functional.pad(vectors_WE, (0, 0, 0, missing)))


@torch.no_grad()
def fit_projection(head: ProjectionHead, batches: Iterable[tuple[Tensor, Tensor]], *, ridge: float = 0.1) -> None:
    """Fit a linear head to a teacher's vectors ``(B, E)`` by least squares on pooled states ``(B, D)``.

    ``ridge`` is relative to the variance of a state's numbers.
    """
    states, vectors = zip(*batches, strict=True)
    states_ND, teacher_NE = torch.cat(states).double(), torch.cat(vectors).double()
    penalty = ridge * len(states_ND) * states_ND.var(dim=0, correction=0).mean()
    gram_DD = states_ND.T @ states_ND + penalty * torch.eye(states_ND.shape[1], dtype=torch.float64)
    head.outer.weight.copy_(torch.linalg.solve(gram_DD, states_ND.T @ teacher_NE).T)


def _commonest(keys_N: Tensor, words: int) -> Tensor:
    """Return the keys ``(W,)`` of the words that are met most often; where there are fewer, keys that no word has."""
    different, counts = keys_N.unique(return_counts=True)
    different, counts = different[counts >= _SEEN], counts[counts >= _SEEN]
    found_W = different[torch.sort(counts, descending=True, stable=True).indices[:words]]
    return torch.cat([found_W, _no_words(words - len(found_W))])


def _no_words(count: int) -> Tensor:
    """Return keys that no word has."""
    return torch.iinfo(torch.int64).min + torch.arange(count)


class StaticFit:
    """Least squares of a teacher's vectors on the mean of a text's rows, with a small ridge.

    The texts' entries are kept, about 30 bytes each, and the equations are solved by conjugate gradients, so that the
    table may have any number of rows.

    ``ridge`` is how much a row has to be seen to count, as a fraction of a text.

    >>> fit = StaticFit(3, 1, ridge=1e-6)
    >>> fit.add(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), torch.tensor([0.5, 0.5, 1.0]),
    ...         torch.tensor([[3.0], [4.0]]))
    >>> [round(value, 3) for value in fit.solve()[:, 0].tolist()]
    [2.0, 4.0, 0.0]
    """

    def __init__(self, rows: int, dimensions: int, *, ridge: float = 0.01) -> None:
        self.rows, self.dimensions, self.ridge = rows, dimensions, ridge
        self._texts = 0
        self._entries: list[tuple[Tensor, Tensor, Tensor]] = []
        self._teacher: list[Tensor] = []

    def add(self, text_N: Tensor, row_N: Tensor, weight_N: Tensor, teacher_BE: Tensor) -> None:
        """Add texts.

        ``text_N`` counts from 0 in this call; ``weight_N`` is what an entry counts in its text.
        """
        self.add_entries(text_N + self._texts, row_N, weight_N)
        self._teacher.append(teacher_BE.float())
        self._texts += len(teacher_BE)

    def add_entries(self, text_N: Tensor, row_N: Tensor, weight_N: Tensor) -> None:
        """Add entries of texts that were added, each text by its number among all."""
        self._entries.append((text_N, row_N, weight_N.float()))

    @torch.no_grad()
    def solve(self, *, tolerance: float = 1e-3, steps: int = 60) -> Tensor:
        """Return the table ``(R, E)``; zeros for a row that was never seen.

        It ends when the residual is ``tolerance`` of the right side, or after so many steps.
        """
        if not self._entries:
            return torch.zeros(self.rows, self.dimensions)
        text_N, row_N, weight_N = (torch.cat(parts) for parts in zip(*self._entries, strict=True))
        mean_BR = _csr(text_N, row_N, weight_N, (self._texts, self.rows))
        sum_RB = _csr(row_N, text_N, weight_N, (self.rows, self._texts))
        right_RE = sum_RB @ torch.cat(self._teacher)
        # The sum of squares of each column: the equations' diagonal, which is all the preconditioning that they need.
        diagonal_R1 = torch.zeros(self.rows).index_add_(0, row_N, weight_N**2)[:, None] + self.ridge
        found_RE, left_RE = torch.zeros_like(right_RE), right_RE.clone()
        nearer_RE = left_RE / diagonal_R1
        along_RE, size_E = nearer_RE.clone(), (left_RE * nearer_RE).sum(0)
        enough = tolerance * right_RE.norm()
        for _ in range(steps):
            if left_RE.norm() <= enough:
                break
            pulled_RE = sum_RB @ (mean_BR @ along_RE) + self.ridge * along_RE
            step_E = size_E / (along_RE * pulled_RE).sum(0).clamp(min=1e-30)
            found_RE += step_E * along_RE
            left_RE -= step_E * pulled_RE
            nearer_RE = left_RE / diagonal_R1
            before_E, size_E = size_E, (left_RE * nearer_RE).sum(0)
            along_RE = nearer_RE + size_E / before_E.clamp(min=1e-30) * along_RE
        return found_RE


def _csr(row_N: Tensor, column_N: Tensor, weight_N: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return a sparse matrix; entries of one place are added up by the products that it is used in."""
    order_N = torch.argsort(row_N, stable=True)
    begins = torch.zeros(shape[0] + 1, dtype=torch.int64)
    begins[1:] = torch.bincount(row_N, minlength=shape[0]).cumsum(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(begins, column_N[order_N], weight_N[order_N], shape, check_invariants=False)
