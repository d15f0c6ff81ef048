"""Trained heads and their files: projections, word vectors, answer tokens, and projections for late interaction.

Vectors of words are knowledge that a small model's layers can't store: a word is a run of tokens of letters and digits,
regardless of case; its key is a hash of its characters, combined from those of its tokens. The vectors of a text's
known words are added to its vector. They are stored in 8 bits a number, or by a product quantizer (Jégou et al. 2011),
which cuts a vector into equal parts and stores for each the nearest of 256 centers.

Answer tokens are trained embeddings behind a text, whose states encode what the frozen model would answer: LLM2Vec-Gen
(BehnamGhader et al., 2026, arXiv 2603.10913). A linear map of what was read makes a few embeddings, after which the
unchanged model writes the answer: so a vector can be read as text.

Shapes: B texts, T tokens, D dimensions of a state, E of a vector, V tokens of the vocabulary, W words, N words in the
texts, L letters of a word at most, C codes of a word, K centers, P numbers of a part; of answer tokens: S of them, R
that are read, D numbers of an embedding, W of a state.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.initialization import no_init_weights

from gerund.checks import write_json
from gerund.errors import ConfigError, DataError
from gerund.models.light_head import (
    HEAD_FILE,
    INSIDE_A_WORD,
    LONGEST_WORD,
    N_CENTERS,
    NO_WORD,
    STARTS_A_WORD,
    WEIGHTS_FILE,
    HeadConfig,
    VectorModule,
    hash_powers,
    head_fingerprint,
    word_hash,
)
from gerund.models.sentence_transformers_folder import MODULE_WEIGHTS, is_ready_made, read_late_modules
from gerund.poolings import pool
from gerund.settings.encoder import ANSWERS_FILE, FORMAT, LATE_FILE, AnswerConfig, LateConfig, read_settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda vectors: vectors,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": nn.functional.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": nn.functional.silu,
}
"""The activation functions of dense layers."""
_EPSILON = 1e-6


class _Dense(nn.Module):
    """A dense layer with sentence-transformers' names of weights."""

    def __init__(self, settings: VectorModule) -> None:
        super().__init__()
        self.linear = nn.Linear(settings.width, settings.dimensions, bias=settings.bias)
        self.activation = ACTIVATIONS[settings.activation]
        self.adds = settings.residual
        self.residual: nn.Linear | None = None
        if settings.residual and settings.width != settings.dimensions:
            self.residual = nn.Linear(settings.width, settings.dimensions, bias=False)

    def forward(self, vectors_BD: Tensor) -> Tensor:
        """Return vectors ``(B, E)``."""
        out_BE = self.activation(self.linear(vectors_BD))
        if not self.adds:
            return out_BE
        residual_BE: Tensor = vectors_BD if self.residual is None else self.residual(vectors_BD)
        return out_BE + residual_BE


class _Normalize(nn.Module):
    def forward(self, vectors_BD: Tensor) -> Tensor:
        """Return the vectors with length 1."""
        return nn.functional.normalize(vectors_BD, dim=-1)


class _LayerNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, vectors_BD: Tensor) -> Tensor:
        """Return the vectors, each of mean 0 and variance 1 before its scale and bias."""
        normed_BD: Tensor = self.norm(vectors_BD)
        return normed_BD


def _built(settings: VectorModule) -> nn.Module:
    if settings.kind == "Dense":
        return _Dense(settings)
    return _Normalize() if settings.kind == "Normalize" else _LayerNorm(settings.width)


class ProjectionHead(nn.Module):
    """A projection head (GUR, section III-C), a linear map into a teacher's space, or sentence-transformers' modules.

    >>> head = ProjectionHead(HeadConfig(width=32, dimensions=8))
    >>> head(torch.zeros(3, 32)).shape
    torch.Size([3, 8])
    """

    def __init__(self, settings: HeadConfig) -> None:
        super().__init__()
        self.settings = settings
        width, dimensions = settings.width, settings.dimensions
        released, linear = settings.variant == "released", settings.variant == "linear"
        self.chain: nn.Sequential | None = None
        if settings.modules is not None:
            self.chain = nn.Sequential(*map(_built, settings.modules))
            return
        self.inner = None if linear else nn.Linear(width, width, bias=not released)
        self.gate = nn.Linear(width, width, bias=False) if released else None
        self.outer = nn.Linear(width, dimensions, bias=not (released or linear))
        self.scale = nn.Parameter(torch.ones(dimensions)) if released else None
        self.tokens: nn.Embedding | None = None
        if settings.vocabulary is not None and settings.has_token_vectors:
            self.tokens = nn.Embedding(settings.vocabulary, dimensions)
            nn.init.zeros_(self.tokens.weight)
        self.words: WordVectors | None = None
        if settings.words is not None and settings.vocabulary is not None:
            self.words = WordVectors(settings.vocabulary, settings.words, dimensions, settings.word_bytes)

    def forward(self, states_BD: Tensor, ids_BT: Tensor | None = None, pooled_BT: Tensor | None = None) -> Tensor:
        """Return vectors ``(B, E)`` of pooled states ``(B, D)``.

        Vectors of tokens and words need the ids and the mask of pooled tokens.
        """
        if self.chain is not None:
            chained_BE: Tensor = self.chain(states_BD)
            return chained_BE
        if self.inner is None:
            vectors_BE: Tensor = self.outer(states_BD)
            return vectors_BE if self.settings.vocabulary is None else vectors_BE + self.static(ids_BT, pooled_BT)
        if self.gate is None or self.scale is None:
            projected_BE: Tensor = self.outer(torch.relu(self.inner(states_BD)))
            return projected_BE
        gated_BD = nn.functional.gelu(self.inner(states_BD), approximate="tanh") * self.gate(states_BD)
        plain_BE = self.outer(gated_BD)
        size_B1 = plain_BE.float().pow(2).mean(-1, keepdim=True).add(_EPSILON).rsqrt()
        return self.scale * plain_BE * size_B1

    def static(self, ids_BT: Tensor | None, pooled_BT: Tensor | None) -> Tensor:
        """Return what a head with a vocabulary adds ``(B, E)``: vectors of the pooled tokens and of their words."""
        if ids_BT is None or pooled_BT is None:
            raise ConfigError("this model's head adds vectors of tokens or words, and no tokens were passed")
        parts = [] if self.tokens is None else [pool(self.tokens(ids_BT), pooled_BT, "mean")]
        parts += [] if self.words is None else [self.words(ids_BT, pooled_BT)]
        return sum(parts[1:], start=parts[0])

    def weights_of(self, module: int) -> dict[str, Tensor]:
        """Return the weights of a module by sentence-transformers' names."""
        start = f"chain.{module}."
        return {
            name.removeprefix(start): tensor.detach().cpu().contiguous()
            for name, tensor in self.state_dict().items()
            if name.startswith(start)
        }

    def without_space(self) -> "ProjectionHead":
        """Return the same head without its shared space, for other encoder settings."""
        if self.settings.space is None:
            return self
        other = copy(self)
        other.settings = replace(self.settings, space=None)
        return other

    @property
    def fingerprint(self) -> str:
        """Hash of shape and weights."""
        exact = {
            name: (tensor.detach().float() if tensor.is_floating_point() else tensor).cpu().contiguous().numpy()
            for name, tensor in self.state_dict().items()
        }
        return head_fingerprint(self.settings, exact)

    def save(self, folder: Path) -> None:
        """Write the head's files into a model's folder; weights that bfloat16 can represent take two bytes each."""
        state = {name: _smallest_dtype(tensor.detach().cpu()) for name, tensor in self.state_dict().items()}
        save_file(state, folder / WEIGHTS_FILE)
        write_json(folder / HEAD_FILE, {"format": FORMAT, "head": self.settings.to_dict()})


def read_head(folder: Path) -> ProjectionHead | None:
    """Read the head of a model's folder, in evaluation mode and float32; None when there is none."""
    path = folder / HEAD_FILE
    if not path.is_file():
        return None
    settings = HeadConfig.from_dict(read_settings(path, "head")["head"])
    stored = read_tensors(folder / WEIGHTS_FILE)
    return head_of(settings, stored, f"{folder / WEIGHTS_FILE}", HEAD_FILE)


def read_tensors(weights: Path) -> dict[str, Tensor]:
    """Read a safetensors file."""
    try:
        return load_file(weights)
    except Exception as error:  # safetensors has an exception outside the built-in ones
        raise DataError(f"{weights} cannot be read: {' '.join(str(error).split())}") from error


def read_matrix(weights: Path, name: str) -> Tensor:
    """Read one tensor of a safetensors file, in float32."""
    tensors = read_tensors(weights)
    if name not in tensors:
        raise DataError(f"{weights} cannot be read: {name!r}")
    return tensors[name].float()


def head_of(settings: HeadConfig, stored: Mapping[str, Tensor], weights: str, described_by: str) -> ProjectionHead:
    """Build a head from its weights, in evaluation mode and float32; the names are for messages."""
    _refuse_others(settings, stored, weights, described_by)
    head = ProjectionHead(settings)
    head.load_state_dict(dict(stored))
    return head.float().eval()


def _smallest_dtype(tensor: Tensor) -> Tensor:
    """Return the tensor in bfloat16 where that is exact, else unchanged."""
    tensor = tensor.contiguous()
    if tensor.dtype == torch.float32:
        rounded = tensor.bfloat16()
        if torch.equal(rounded.float(), tensor):
            return rounded
    return tensor


def _refuse_others(settings: HeadConfig, stored: Mapping[str, Tensor], weights: str, described_by: str) -> None:
    """Refuse weights that don't match the head, before memory is allocated."""
    # Initial values on the meta device would have torch import a compiler's worth of modules.
    with torch.device("meta"), no_init_weights():
        expected = ProjectionHead(settings).state_dict()
    if expected.keys() != stored.keys():
        unexpected = sorted(expected.keys() ^ stored.keys())[0]
        raise DataError(
            f"{weights} does not hold a head as {described_by} describes it: {unexpected} is in one of them only"
        )
    for key, tensor in expected.items():
        if stored[key].shape != tensor.shape:
            shapes = ["x".join(map(str, shape)) for shape in (tensor.shape, stored[key].shape)]
            raise DataError(f"{weights} does not fit {described_by}, which makes {key} {shapes[0]}: it has {shapes[1]}")
        if not torch.isfinite(stored[key]).all():
            raise DataError(f"{weights}: {key} holds numbers that are not finite (NaN or infinity)")


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_SPACES = ("Ġ", "▁")
"""Markers of a leading space in byte-level and SentencePiece vocabularies."""
_LEVELS = 127
_ROUNDS = 20


class WordVectors(nn.Module):
    """Vectors of words, quantized with a scale per word; they are fitted, not trained.

    ``codes`` is the number of bytes of a word's vector; None stores 8 bits a number.
    """

    pieces_V: Tensor
    lengths_V: Tensor
    kinds_V: Tensor
    keys_W: Tensor
    scales_W: Tensor
    values_WE: Tensor
    codes_WC: Tensor
    centers_CKP: Tensor
    powers_L: Tensor

    def __init__(self, vocabulary: int, words: int, dimensions: int, codes: int | None = None) -> None:
        super().__init__()
        self.codes, self.dimensions = codes, dimensions
        self.register_buffer("pieces_V", torch.zeros(vocabulary, dtype=torch.int64))
        self.register_buffer("lengths_V", torch.zeros(vocabulary, dtype=torch.uint8))
        self.register_buffer("kinds_V", torch.zeros(vocabulary, dtype=torch.uint8))
        self.register_buffer("keys_W", torch.arange(words, dtype=torch.int64))
        self.register_buffer("scales_W", torch.zeros(words))
        if codes is None:
            self.register_buffer("values_WE", torch.zeros(words, dimensions, dtype=torch.int8))
        else:
            self.register_buffer("codes_WC", torch.zeros(words, codes, dtype=torch.uint8))
            self.register_buffer("centers_CKP", torch.zeros(codes, N_CENTERS, dimensions // codes))
        self.register_buffer("powers_L", torch.tensor(hash_powers()), persistent=False)

    def read_tokens(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Store what each token of a vocabulary adds to a word."""
        special = set(tokenizer.all_special_ids)
        pieces = tokenizer.convert_ids_to_tokens(list(range(min(len(self.pieces_V), len(tokenizer)))))
        marks_inside = any(piece.startswith("##") for piece in pieces)
        for number, piece in enumerate(pieces):
            if number in special or not (parsed := _letters(tokenizer, piece, marks_inside)):
                continue
            letters, starts = parsed
            self.pieces_V[number] = word_hash(letters)
            self.lengths_V[number] = min(len(letters), 255)
            self.kinds_V[number] = STARTS_A_WORD if starts else INSIDE_A_WORD

    def keys(self, ids_BT: Tensor, pooled_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key ``(B, T)`` of the word that each token belongs to, up to it, and whether a word ends there."""
        kinds_BT = self.kinds_V[ids_BT]
        inside_BT = pooled_BT.bool() & (kinds_BT != NO_WORD)
        edge_B1 = torch.zeros_like(inside_BT[:, :1])
        begins_BT = inside_BT & ((kinds_BT == STARTS_A_WORD) | ~torch.cat([edge_B1, inside_BT[:, :-1]], dim=1))
        ends_BT = inside_BT & ~torch.cat([(inside_BT & ~begins_BT)[:, 1:], edge_B1], dim=1)
        start_BT = _last(begins_BT)
        length_BT = self.lengths_V[ids_BT].long() * inside_BT
        before_BT = length_BT.cumsum(1) - length_BT
        offset_BT = (before_BT - before_BT.gather(1, start_BT)).clamp(min=0, max=LONGEST_WORD - 1)
        # 64-bit integers wrap around: a hash modulo 2^64.
        parts_BT = self.pieces_V[ids_BT] * self.powers_L[offset_BT] * inside_BT
        sums_BT = parts_BT.cumsum(1)
        return sums_BT - (sums_BT - parts_BT).gather(1, start_BT), ends_BT

    def words(self, ids_BT: Tensor, pooled_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the text ``(N,)`` and the key ``(N,)`` of each word."""
        keys_BT, ends_BT = self.keys(ids_BT, pooled_BT)
        return ends_BT.nonzero()[:, 0], keys_BT[ends_BT]

    def rows(self, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Return the row of each key, and whether it is known."""
        row = _search(self.keys_W, keys).clamp(max=len(self.keys_W) - 1)
        return row, self.keys_W[row] == keys

    def vectors(self, row_N: Tensor) -> Tensor:
        """Return the vectors of rows ``(..., E)``, float32."""
        scale_N1 = self.scales_W[row_N][..., None]
        if self.codes is None:
            return self.values_WE[row_N].float() * scale_N1
        part_C = torch.arange(self.codes, device=row_N.device)
        parts_NCP = self.centers_CKP[part_C, self.codes_WC[row_N].long()]
        return parts_NCP.flatten(-2).float() * scale_N1

    def forward(self, ids_BT: Tensor, pooled_BT: Tensor) -> Tensor:
        """Return the sum of the vectors of each text's words over the number of its tokens, ``(B, E)``."""
        n_B1 = pooled_BT.sum(1, keepdim=True).clamp(min=1)
        if torch.compiler.is_exporting():  # an exported graph has no lists of variable length
            keys_BT, ends_BT = self.keys(ids_BT, pooled_BT)
            row_BT, known_BT = self.rows(keys_BT)
            return (self.vectors(row_BT) * (known_BT & ends_BT)[..., None]).sum(1) / n_B1
        text_N, keys_N = self.words(ids_BT, pooled_BT)
        row_N, known_N = self.rows(keys_N)
        sum_BE = torch.zeros(len(ids_BT), self.dimensions, device=ids_BT.device)
        return sum_BE.index_add_(0, text_N[known_N], self.vectors(row_N[known_N])) / n_B1

    @torch.no_grad()
    def keep(self, keys_W: Tensor, vectors_WE: Tensor) -> None:
        """Store words and their vectors, quantized."""
        order_W = torch.argsort(keys_W)
        vectors_WE = vectors_WE[order_W]
        self.keys_W.copy_(keys_W[order_W])
        if self.codes is not None:
            self._keep_codes(vectors_WE)
            return
        largest_W = vectors_WE.abs().amax(1)
        self.scales_W.copy_(largest_W / _LEVELS)
        self.values_WE.copy_((vectors_WE / (largest_W / _LEVELS).clamp(min=1e-30)[:, None]).round())

    def _keep_codes(self, vectors_WE: Tensor) -> None:
        """Cluster each part of the vectors, at length 1, around its centers."""
        length_W = vectors_WE.norm(dim=1)
        self.scales_W.copy_(length_W)
        unit_WE = vectors_WE / length_W.clamp(min=1e-30)[:, None]
        known_WE = unit_WE[length_W > 0]
        size = self.centers_CKP.shape[2]
        for part, (known_WP, unit_WP) in enumerate(zip(known_WE.split(size, 1), unit_WE.split(size, 1), strict=True)):
            centers_KP = _clustered(known_WP).bfloat16().float()
            self.centers_CKP[part, : len(centers_KP)] = centers_KP
            self.codes_WC[:, part] = torch.cdist(unit_WP, centers_KP).argmin(1).to(torch.uint8)


def _clustered(rows_NP: Tensor) -> Tensor:
    """Return at most 256 centers ``(K, P)`` of rows, by k-means; the rows themselves where there are no more."""
    different_NP = rows_NP.unique(dim=0)
    if len(different_NP) <= N_CENTERS:
        return different_NP if len(different_NP) else torch.zeros(1, rows_NP.shape[1])
    generator = torch.Generator().manual_seed(0)
    centers_KP = different_NP[torch.randperm(len(different_NP), generator=generator)[:N_CENTERS]]
    for _ in range(_ROUNDS):
        nearest_N = torch.cdist(rows_NP, centers_KP).argmin(1)
        count_K1 = torch.bincount(nearest_N, minlength=N_CENTERS)[:, None]
        sums_KP = torch.zeros_like(centers_KP).index_add_(0, nearest_N, rows_NP)
        centers_KP = torch.where(count_K1 > 0, sums_KP / count_K1.clamp(min=1), centers_KP)
    return centers_KP


def _letters(tokenizer: "PreTrainedTokenizerBase", piece: str, marks_inside: bool) -> tuple[str, bool] | None:
    """Return the letters of a token in lower case, and whether a word starts with it.

    None for a token of other characters.
    """
    starts = piece.startswith(_SPACES) or (marks_inside and not piece.startswith("##"))
    bare = piece.lstrip("".join(_SPACES)).removeprefix("##")
    text = tokenizer.convert_tokens_to_string([bare]).strip()
    # Bytes of a partial character count as the letters that the vocabulary writes.
    partial = "\ufffd" in text
    text = bare if partial else text
    if not text or not all(sign.isalnum() or (partial and ord(sign) > 127) for sign in text):
        return None
    return text.lower(), starts


def _last(true_BT: Tensor) -> Tensor:
    """Return the position of the last True up to each position; 0 where there is none yet."""
    place_T = torch.arange(true_BT.shape[1], device=true_BT.device)
    if not torch.compiler.is_exporting():
        return (place_T * true_BT).cummax(1).values
    return (true_BT[:, None, :] & (place_T <= place_T[:, None])).mul(place_T).amax(-1)


def _search(sorted_W: Tensor, keys: Tensor) -> Tensor:
    """Return ``torch.searchsorted``, for which ONNX has no operator."""
    if not torch.compiler.is_exporting():
        return torch.searchsorted(sorted_W, keys)
    position = torch.zeros_like(keys)
    for bit in reversed(range(len(sorted_W).bit_length())):
        further = position + (1 << bit)
        smaller = sorted_W[(further - 1).clamp(max=len(sorted_W) - 1)] < keys
        position = torch.where(smaller & (further <= len(sorted_W)), further, position)
    return position


_LATE_WEIGHTS = "late.safetensors"
_PROJECTION = "projection.weight"


@dataclass(frozen=True, eq=False)
class LateHead:
    """How token vectors are made of states: the settings, and a linear map without bias."""

    config: LateConfig
    projection_ED: np.ndarray  # float32

    @property
    def dimensions(self) -> int:
        """Dimensions of a token vector."""
        return int(self.projection_ED.shape[0])

    @property
    def fingerprint(self) -> str:
        """Hash of settings and values."""
        settings = json.dumps(self.config.to_dict(), sort_keys=True).encode()
        values = np.ascontiguousarray(self.projection_ED).tobytes()
        return hashlib.blake2b(settings + values, digest_size=8).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files into a model's folder."""
        save_file({_PROJECTION: torch.from_numpy(np.ascontiguousarray(self.projection_ED))}, folder / _LATE_WEIGHTS)
        write_json(folder / LATE_FILE, {"format": FORMAT, "late": self.config.to_dict()})


def read_late(folder: Path | None, width: int) -> LateHead | None:
    """Return what a folder has of it; None without ``late.json``. ``width`` is that of the model's states.

    Raises:
        DataError: the weights cannot be read, or are for other states.
    """
    if folder is None:
        return None
    if not (folder / LATE_FILE).is_file():
        return _of_sentence_transformers(folder, width)
    config = LateConfig.from_dict(read_settings(folder / LATE_FILE, "late")["late"])
    weights = folder / _LATE_WEIGHTS
    projection_ED = read_matrix(weights, _PROJECTION).numpy()
    if projection_ED.ndim != 2 or projection_ED.shape[1] != width:
        raise DataError(f"{weights} is for other states than this model's, of {width} numbers")
    return LateHead(config, projection_ED)


def _of_sentence_transformers(folder: Path, width: int) -> LateHead | None:
    """Return what a folder of sentence-transformers' ``MultiVectorEncoder`` or PyLate has of it; None for another.

    Linear maps that follow each other are one.
    """
    if not is_ready_made(folder) or (stored := read_late_modules(folder)) is None:
        return None
    projection_ED = np.eye(width, dtype=np.float32)
    for path in stored.layers:
        weights = folder / path / MODULE_WEIGHTS
        weight_ED = read_matrix(weights, "linear.weight").numpy()
        if weight_ED.ndim != 2 or weight_ED.shape[1] != len(projection_ED):
            raise DataError(f"{weights} is for vectors of {weight_ED.shape[-1]} numbers, not {len(projection_ED)}")
        projection_ED = weight_ED @ projection_ED
    return LateHead(stored.config, projection_ED)


_ANSWERS_WEIGHTS = "answers.safetensors"
_SMALLEST_POWER = 1e-12


class AnswerTokens(nn.Module):
    """The embeddings of the answer tokens, and the map to the embeddings that the model writes the answer after.

    >>> tokens = AnswerTokens(AnswerConfig(4, 2, "states"), embedding=8, state=8, vector=3)
    >>> tokens.prefix(torch.ones(5, 2, 8)).shape
    torch.Size([5, 2, 8])
    """

    def __init__(self, settings: AnswerConfig, *, embedding: int, state: int, vector: int) -> None:
        """Make untrained ones, of the sizes of an embedding, of a state and of a vector."""
        super().__init__()
        self.settings = settings
        self.embeddings = nn.Parameter(torch.zeros(settings.tokens, embedding))
        sizes = (state, embedding) if settings.prefix == "states" else (vector, settings.read * embedding)
        self.map = nn.Linear(*sizes)

    def states(self, model: "PreTrainedModel", ids_BT: Tensor, end_B: Tensor) -> Tensor:
        """Return the last hidden states ``(B, R, W)`` of the tokens that are read, of length 1.

        States are large in some models, and a step of the maps would be too.

        Args:
            model: the language model, which reads causally.
            ids_BT: texts padded on the right, with room for the answer tokens behind each.
            end_B: the length of each text.
        """
        row_B1 = torch.arange(len(ids_BT), device=ids_BT.device)[:, None]
        place_BS = end_B[:, None] + torch.arange(self.settings.tokens, device=ids_BT.device)
        embedded_BTD = model.get_input_embeddings()(ids_BT)
        own_BSD = self.embeddings.to(embedded_BTD).expand(len(ids_BT), -1, -1)
        embedded_BTD = embedded_BTD.index_put((row_B1, place_BS), own_BSD)
        hidden_BTW: Tensor = model.base_model(inputs_embeds=embedded_BTD, use_cache=False).last_hidden_state
        return nn.functional.normalize(hidden_BTW[row_B1, place_BS[:, -self.settings.read :]].float(), dim=-1)

    def prefix(self, given: Tensor) -> Tensor:
        """Return the embeddings ``(B, R, D)`` to write an answer after, of states ``(B, R, W)`` or vectors ``(B, E)``.

        Lengths do not count: a vector says the same normalized.
        """
        given = given.float()
        mapped: Tensor = self.map(given * given.pow(2).mean(-1, keepdim=True).add(_SMALLEST_POWER).rsqrt())
        return mapped if self.settings.prefix == "states" else mapped.unflatten(-1, (self.settings.read, -1))

    def opening(self, model: "PreTrainedModel", given: Tensor) -> Tensor:
        """Return what the model reads before it writes: special tokens as before every text, and the prefix."""
        prefix_BRD = self.prefix(given).to(model.get_input_embeddings().weight.dtype)
        if not self.settings.before:
            return prefix_BRD
        ids_BK = torch.tensor([self.settings.before], dtype=torch.long, device=prefix_BRD.device).expand(len(given), -1)
        before_BKD = model.get_input_embeddings()(ids_BK)
        return torch.cat([before_BKD, prefix_BRD.to(before_BKD)], dim=1)

    @property
    def fingerprint(self) -> str:
        """Hash of settings and the embeddings, on which vectors depend."""
        settings = json.dumps(self.settings.to_dict(), sort_keys=True).encode()
        values = self.embeddings.detach().float().cpu().contiguous().numpy().tobytes()
        return hashlib.blake2b(settings + values, digest_size=8).hexdigest()

    def save(self, folder: Path) -> None:
        """Write the files into a model's folder."""
        state = {name: tensor.detach().float().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(state, folder / _ANSWERS_WEIGHTS)
        write_json(folder / ANSWERS_FILE, {"format": FORMAT, "answers": self.settings.to_dict()})


def embedding_width(model: "PreTrainedModel") -> int:
    """Return the size of an input embedding."""
    embed = model.get_input_embeddings()
    return int(embed(torch.zeros(1, 1, dtype=torch.long, device=embed.weight.device)).shape[-1])


def read_answers(folder: Path, *, embedding: int, state: int, vector: int) -> AnswerTokens:
    """Return the answer tokens in a folder, in evaluation mode.

    Raises:
        DataError: they cannot be read, or are for a model of other sizes.
    """
    settings = AnswerConfig.from_dict(read_settings(folder / ANSWERS_FILE, "answers")["answers"])
    stored = read_tensors(folder / _ANSWERS_WEIGHTS)
    tokens = AnswerTokens(settings, embedding=embedding, state=state, vector=vector)
    expected = {name: tuple(tensor.shape) for name, tensor in tokens.state_dict().items()}
    if expected != {name: tuple(tensor.shape) for name, tensor in stored.items()}:
        raise DataError(
            f"{folder / _ANSWERS_WEIGHTS} is for another model than this one, or for another {ANSWERS_FILE}"
        )
    if not all(torch.isfinite(tensor).all() for tensor in stored.values()):
        raise DataError(f"{folder / _ANSWERS_WEIGHTS} holds numbers that are not finite (NaN or infinity)")
    tokens.load_state_dict(stored)
    return tokens.float().eval().requires_grad_(False)
