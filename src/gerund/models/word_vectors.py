"""Vectors of words, looked up by a text's tokens: knowledge that a small model's layers can't store.

A word is a run of tokens of letters and digits, regardless of case: its key is a hash of its characters, combined from
those of its tokens. The vectors of a text's known words are added to its vector.

Shapes: B texts, T tokens, V tokens of the vocabulary, W words, N words in the texts, L letters of a word at most, E
dimensions of a vector.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BREAK, _INSIDE, _START = 0, 1, 2
_BASE = 0x9E3779B97F4A7C15  # odd, so that no place of a word is lost
_LONGEST = 64
_SPACES = ("Ġ", "▁")
"""What byte-level and SentencePiece vocabularies write for the space before a token."""
_LEVELS = 127


class WordVectors(nn.Module):
    """Vectors of words, 8 bits a number with a scale for each word; they are fitted, not trained."""

    pieces_V: Tensor
    lengths_V: Tensor
    kinds_V: Tensor
    keys_W: Tensor
    values_WE: Tensor
    scales_W: Tensor
    powers_L: Tensor

    def __init__(self, vocabulary: int, words: int, dimensions: int) -> None:
        super().__init__()
        self.register_buffer("pieces_V", torch.zeros(vocabulary, dtype=torch.int64))
        self.register_buffer("lengths_V", torch.zeros(vocabulary, dtype=torch.uint8))
        self.register_buffer("kinds_V", torch.zeros(vocabulary, dtype=torch.uint8))
        self.register_buffer("keys_W", torch.arange(words, dtype=torch.int64))
        self.register_buffer("values_WE", torch.zeros(words, dimensions, dtype=torch.int8))
        self.register_buffer("scales_W", torch.zeros(words))
        self.register_buffer("powers_L", _powers(), persistent=False)

    def read_tokens(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        """Note what each token of a vocabulary adds to a word."""
        special = set(tokenizer.all_special_ids)
        pieces = tokenizer.convert_ids_to_tokens(list(range(min(len(self.pieces_V), len(tokenizer)))))
        marks_inside = any(piece.startswith("##") for piece in pieces)
        for number, piece in enumerate(pieces):
            if number in special or not (found := _letters(tokenizer, piece, marks_inside)):
                continue
            letters, starts = found
            self.pieces_V[number] = _hash(letters)
            self.lengths_V[number] = min(len(letters), 255)
            self.kinds_V[number] = _START if starts else _INSIDE

    def keys(self, ids_BT: Tensor, pooled_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Return the key ``(B, T)`` of the word that each token belongs to, up to it, and whether a word ends there."""
        kinds_BT = self.kinds_V[ids_BT]
        inside_BT = pooled_BT.bool() & (kinds_BT != _BREAK)
        edge_B1 = torch.zeros_like(inside_BT[:, :1])
        begins_BT = inside_BT & ((kinds_BT == _START) | ~torch.cat([edge_B1, inside_BT[:, :-1]], dim=1))
        ends_BT = inside_BT & ~torch.cat([(inside_BT & ~begins_BT)[:, 1:], edge_B1], dim=1)
        start_BT = _last(begins_BT)
        length_BT = self.lengths_V[ids_BT].long() * inside_BT
        before_BT = length_BT.cumsum(1) - length_BT
        offset_BT = (before_BT - before_BT.gather(1, start_BT)).clamp(min=0, max=_LONGEST - 1)
        # Products and sums of 64-bit integers go on from the other end beyond the largest: a hash modulo 2 to the 64.
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

    def forward(self, ids_BT: Tensor, pooled_BT: Tensor) -> Tensor:
        """Return the sum of the vectors of each text's words over the number of its tokens, ``(B, E)``."""
        n_B1 = pooled_BT.sum(1, keepdim=True).clamp(min=1)
        if torch.compiler.is_exporting():  # a graph has no list of words whose length the texts decide
            keys_BT, ends_BT = self.keys(ids_BT, pooled_BT)
            row_BT, known_BT = self.rows(keys_BT)
            weight_BT = self.scales_W[row_BT] * (known_BT & ends_BT)
            return (self.values_WE[row_BT].float() * weight_BT[..., None]).sum(1) / n_B1
        text_N, keys_N = self.words(ids_BT, pooled_BT)
        row_N, known_N = self.rows(keys_N)
        vector_NE = self.values_WE[row_N].float() * (self.scales_W[row_N] * known_N)[:, None]
        sum_BE = torch.zeros(len(ids_BT), self.values_WE.shape[1], device=ids_BT.device)
        return sum_BE.index_add_(0, text_N, vector_NE) / n_B1

    @torch.no_grad()
    def keep(self, keys_W: Tensor, vectors_WE: Tensor) -> None:
        """Take over words and their vectors, which are rounded to 8 bits a number."""
        order_W = torch.argsort(keys_W)
        vectors_WE = vectors_WE[order_W]
        largest_W = vectors_WE.abs().amax(1)
        self.keys_W.copy_(keys_W[order_W])
        self.scales_W.copy_(largest_W / _LEVELS)
        self.values_WE.copy_((vectors_WE / (largest_W / _LEVELS).clamp(min=1e-30)[:, None]).round())


def _letters(tokenizer: "PreTrainedTokenizerBase", piece: str, marks_inside: bool) -> tuple[str, bool] | None:
    """Return the letters of a token in lower case, and whether a word starts with it; None for a token of signs."""
    starts = piece.startswith(_SPACES) or (marks_inside and not piece.startswith("##"))
    bare = piece.lstrip("".join(_SPACES)).removeprefix("##")
    text = tokenizer.convert_tokens_to_string([bare]).strip()
    # Bytes of a part of a character stand for nothing alone; they count as the letters that the vocabulary writes.
    partial = "\ufffd" in text
    text = bare if partial else text
    if not text or not all(sign.isalnum() or (partial and ord(sign) > 127) for sign in text):
        return None
    return text.lower(), starts


def _hash(letters: str) -> int:
    value = 0
    for place, sign in enumerate(letters):
        value += (ord(sign) + 1) * pow(_BASE, place, 1 << 64)
    return _signed(value)


def _powers() -> Tensor:
    """Return the base's powers by place ``(L,)``."""
    return torch.tensor([_signed(pow(_BASE, place, 1 << 64)) for place in range(_LONGEST)])


def _signed(value: int) -> int:
    """Return the 64-bit integer that a number is modulo 2 to the 64."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


def _last(true_BT: Tensor) -> Tensor:
    """Return the place of the last True up to each place; 0 where there is none yet."""
    place_T = torch.arange(true_BT.shape[1], device=true_BT.device)
    if not torch.compiler.is_exporting():
        return (place_T * true_BT).cummax(1).values
    return (true_BT[:, None, :] & (place_T <= place_T[:, None])).mul(place_T).amax(-1)


def _search(sorted_W: Tensor, keys: Tensor) -> Tensor:
    """Return how many of the sorted keys are smaller than each; ONNX has no operator for it."""
    if not torch.compiler.is_exporting():
        return torch.searchsorted(sorted_W, keys)
    found = torch.zeros_like(keys)
    for bit in reversed(range(len(sorted_W).bit_length())):
        further = found + (1 << bit)
        smaller = sorted_W[(further - 1).clamp(max=len(sorted_W) - 1)] < keys
        found = torch.where(smaller & (further <= len(sorted_W)), further, found)
    return found
