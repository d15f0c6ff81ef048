"""Trains a byte-level BPE tokenizer and saves it as a folder that ``AutoTokenizer`` opens.

Knows: the pre-tokenisation, the special tokens and their ids. Does not know: where the texts come from.
Every text comes back unchanged from ``decode(encode(text))``, and the same texts give the same tokenizer.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from gerund.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"
RESERVED = tuple(f"<|reserved_{i}|>" for i in range(12))
SPECIAL_TOKENS = (BOS, EOS, PAD, MASK, *RESERVED)
"""Their ids are their places here. The mask token serves infilling, the reserved ones later markers."""

# Llama 3's pattern with digits one by one, so that numbers share their pieces in a small vocabulary.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, max_length: int, sentinels: int = 0
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE on ``texts``.

    Args:
        texts: Documents, read once.
        vocab_size: Number of tokens, special ones included.
        max_length: What the tokenizer reports as the longest text the model takes.
        sentinels: For models with an encoder of their own: so many tokens ``<extra_id_0>``, ... stand for spans.

    Returns:
        A tokenizer that puts BOS in front of every text and has bos, eos, pad and mask set; with sentinels it also
        puts EOS behind, as T5's do.

    Raises:
        ConfigError: ``vocab_size`` leaves no room for the 256 bytes and the special tokens.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = [*SPECIAL_TOKENS, *(f"<extra_id_{number}>" for number in range(sentinels))]
    smallest = 256 + len(special)
    if vocab_size < smallest:
        raise ConfigError(f"vocab_size {vocab_size} is too small; bytes and special tokens need {smallest}")
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    end = f" {EOS}" if sentinels else ""
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A{end}",
        pair=f"{BOS} $A{end} {BOS} $B{end}",
        special_tokens=[(token, SPECIAL_TOKENS.index(token)) for token in ((BOS, EOS) if sentinels else (BOS,))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        mask_token=MASK,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **({"extra_special_tokens": special[len(SPECIAL_TOKENS) :]} if sentinels else {}),
    )


def load_tokenizer(folder: str | Path) -> "PreTrainedTokenizerFast":
    """Open a tokenizer folder that this module (or anyone) saved.

    Raises:
        ConfigError: The folder is missing or holds no fast tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    if not (Path(folder) / "tokenizer.json").is_file():
        raise ConfigError(f"{folder}: no tokenizer.json there")
    return PreTrainedTokenizerFast.from_pretrained(str(folder))
