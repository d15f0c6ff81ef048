"""Small tokenizers of the kinds in use: who begins and ends a text, and how a prompt grows into it."""

from string import ascii_letters

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tests.tiny import byte_tokenizer


def without_bos():
    """Build one like Qwen2's: no BOS, and EOS is never added."""
    tokenizer = byte_tokenizer(bos=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, eos_token="</s>", pad_token="<pad>")


def one_token_for_both():
    """Build one like GPT-2's: BOS and EOS are the same token, which is never added."""
    tokenizer = byte_tokenizer(bos=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, bos_token="</s>", eos_token="</s>")


def without_either():
    return PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(bos=False).backend_tokenizer, pad_token="<pad>")


def with_both():
    """Build one that puts BOS in front and EOS at the end of every text."""
    core = byte_tokenizer(bos=False).backend_tokenizer
    core.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=False),
        processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]),
    ])  # fmt: skip
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def sentencepiece(underscore="_"):
    """Build one like LLaMA-2's: "▁" for spaces and before every text, merges across nothing but letters."""
    letters = [*ascii_letters, *":,.▁", underscore]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "<s>", "</s>", *letters])}
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("▁", "a"), (":", "▁a"), ("▁", underscore)]
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def words_only():
    """Build one with a token a word, and no underscore among them."""
    core = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="<s>")


def greedy():
    """Build one where "x" and "the" are two tokens alone and three together: "xt", "h", "e"."""
    letters = ["<s>", "</s>", *"xthea"]
    merges = [("x", "t"), ("t", "h"), ("th", "e")]
    vocabulary = {token: index for index, token in enumerate([*letters, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
