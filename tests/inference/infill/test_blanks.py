"""A text with blanks: its pieces, and their tokens as inside a text, whatever a tokenizer does at the start of one."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gerund.inference.infill.blanks import BlankedText
from gerund.inference.text_ids import ids_inside
from gerund.models.sources import find
from tests.tiny import byte_tokenizer


def space_first_tokenizer(scheme="first"):
    """Build a tokenizer of the SentencePiece kind, which puts a space before whatever begins a text."""
    characters = ["<unk>", *"\u2581abcdefghijklmnopqrstuvwxyz.1\n)"]
    words = ["\u2581he", "he", "ab", "\u2581a", "\u2581\u2581"]
    vocabulary = {token: index for index, token in enumerate([*characters, *words])}
    merges = [("h", "e"), ("\u2581", "he"), ("a", "b"), ("\u2581", "a"), ("\u2581", "\u2581")]
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@pytest.mark.parametrize(
    "text, tokens",
    [
        (" he", ["\u2581he"]),
        ("he", ["he"]),
        (" he he", ["\u2581he", "\u2581he"]),
        ("b", ["b"]),  # "ab" is one token: the boundary has to be sought elsewhere
        (". he", [".", "\u2581he"]),
        ("\nhe", ["\n", "he"]),
        ("", []),
    ],
)
def test_a_piece_gets_no_space_that_it_does_not_have(scheme, text, tokens):
    tokenizer = space_first_tokenizer(scheme)
    assert tokenizer.convert_ids_to_tokens(ids_inside(tokenizer, text)) == tokens


@pytest.mark.parametrize(
    "tokenizer", [byte_tokenizer(), byte_tokenizer(bos=False), AutoTokenizer.from_pretrained(find(None).where)]
)
@pytest.mark.parametrize(
    "text", [" the end", "the end", ".", "n", "\n\nHe", "\u00e9t\u00e9", "\U0001f600", "  two", "123"]
)
def test_byte_level_tokenizers_read_a_piece_as_they_read_it_alone(tokenizer, text):
    assert ids_inside(tokenizer, text) == tokenizer(text, add_special_tokens=False).input_ids


def test_a_piece_that_no_anchor_divides_is_read_alone():
    vocabulary = {token: index for index, token in enumerate(["<unk>", "b", "ab", ".b", "1b", "\nb", ")b", "a"])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")
    assert ids_inside(tokenizer, "b") == [1]


def test_pieces_of_a_text():
    text = BlankedText.of(" a \t[blank]  b [blank]\n", "[blank]")
    assert text.pieces == (" a", "  b", "\n")
    assert text.gaps == 2
    assert text.joined([" x", " y"]) == " a x  b y\n"
    assert [text.trimmed(0, " x \n"), text.trimmed(1, " y ")] == [" x", " y"]
    assert BlankedText.of("un[blank]able", "[blank]").trimmed(0, "bear ") == "bear "
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(text.ids(tokenizer)[0]) == "  b"
    assert text.ids(tokenizer)[1] == []
