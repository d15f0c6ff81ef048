"""The tokenizer of a training: a byte-level BPE trained on the sources, or an existing one; and its mask token.

Every text comes back unchanged from ``decode(encode(text))``, and the same texts give the same tokenizer. No token is
added to the vocabulary of a base: embeddings would have to grow, and the model would no longer be the one that was
given.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gerund.data.corpus import clean_text, read_documents
from gerund.errors import ConfigError, OutputExistsError
from gerund.jobs.files import atomic_folder
from gerund.models.folder_files import demand_readable_files
from gerund.models.kinds import SEQ2SEQ
from gerund.models.sources import find
from gerund.settings.encoder import DEFAULT_MODEL
from gerund.training.corpus.texts import cache_folder, existing
from gerund.training.recipe import Recipe, TokenizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"
RESERVED = tuple(f"<|reserved_{i}|>" for i in range(12))
SPECIAL_TOKENS = (BOS, EOS, PAD, MASK, *RESERVED)
"""Their ids are their places here. The mask token serves infilling, the reserved ones later markers."""

# As many as T5 has.
_SENTINELS = 100

USUAL_MASK = "_"
"""Rare and a token of its own in most vocabularies; MAGNET's choice for LLaMA-2 (Appendix A)."""

# Llama 3's pattern with digits one by one, so that numbers share their pieces in a small vocabulary.
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, max_length: int, sentinels: int = 0
) -> "PreTrainedTokenizerFast":
    """Train a byte-level BPE on ``texts``.

    It puts BOS before every text and has bos, eos, pad and mask set. With ``sentinels`` it also has so many tokens
    ``<extra_id_0>``, ... for spans, and puts EOS after texts, as T5's do.
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
    """Open a tokenizer folder that this module (or anyone) saved; ``default`` is that of the bundled model."""
    from transformers import PreTrainedTokenizerFast

    if str(folder) == DEFAULT_MODEL and not Path(folder).is_dir():
        folder = find(DEFAULT_MODEL).where
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ConfigError(f"{folder}: no tokenizer.json there")
    demand_readable_files(Path(folder))
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def prepare_tokenizer(recipe: Recipe) -> "PreTrainedTokenizerFast":
    """Open the tokenizer of a new model, or train it, or take the one trained on the same data before."""
    settings = recipe.tokenizer or TokenizerConfig()
    if settings.path is not None:
        return load_tokenizer(settings.path)
    sources = [(s.clean, s.weight, s.text_column, _stamps(recipe, s.files)) for s in recipe.data.sources]
    sentinels = sentinels_of(recipe)
    content: list[Any] = [1, settings.vocab_size, settings.sample_mb, settings.max_length, sources]
    content += [sentinels] if sentinels else []
    key = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]
    folder = cache_folder(recipe) / f"tokenizer-{key}"
    if not folder.is_dir():
        texts = _sample(recipe, settings.sample_mb)
        tokenizer = train_tokenizer(
            texts, vocab_size=settings.vocab_size, max_length=settings.max_length, sentinels=sentinels
        )
        # Another training may have trained the same one in the meantime.
        with suppress(OutputExistsError), atomic_folder(folder) as partial:
            tokenizer.save_pretrained(str(partial))
    # Read back also when just trained, so that the first run and a resumed one use the very same object.
    return load_tokenizer(folder)


def sentinels_of(recipe: Recipe) -> int:
    """Return how many sentinels the tokenizer of a new model has: those of a T5."""
    return _SENTINELS if (recipe.model.config or {}).get("model_type") in SEQ2SEQ else 0


def _sample(recipe: Recipe, megabytes: float) -> Iterator[str]:
    total = sum(source.weight for source in recipe.data.sources)
    for source in recipe.data.sources:
        budget = megabytes * 1e6 * source.weight / total
        for document in read_documents(existing(recipe, source.files), text_column=source.text_column):
            text = clean_text(document.text, source.clean)
            yield text
            budget -= len(text.encode("utf-8"))
            if budget <= 0:
                break


def _stamps(recipe: Recipe, files: list[Path]) -> list[tuple[str, int, int]]:
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in existing(recipe, files)]


def pick_mask_token(tokenizer: "PreTrainedTokenizerBase", wanted: str | None) -> int:
    """Return the id of the mask token: the wanted one, else the tokenizer's own, else ``_``."""
    if wanted is not None:
        result = _single(tokenizer, wanted)
        if result is None:
            pieces = tokenizer.tokenize(wanted)
            raise ConfigError(
                f"mask_token {wanted!r} is no token of this tokenizer but {len(pieces)} pieces; "
                "give the text of one token, such as '_', or leave it out"
            )
        return result
    mask_id: int | None = tokenizer.mask_token_id
    if mask_id is not None:
        return mask_id
    result = _single(tokenizer, USUAL_MASK)
    if result is None:
        raise ConfigError(
            f"this tokenizer has no mask token and {USUAL_MASK!r} is no token of it either; "
            "set mask_token to a rarely used token of its vocabulary"
        )
    return result


def _single(tokenizer: "PreTrainedTokenizerBase", text: str) -> int | None:
    # The vocabulary comes first: encoding "_" with SentencePiece gives "▁" and "_", or another token, "▁_".
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if text in vocabulary:
        return vocabulary[text]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False) if text else []
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None
