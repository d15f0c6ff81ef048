"""The tokenizer of a training, trained on the sources or an existing one, and how it formats texts for the encoder.

Every text comes back unchanged from ``decode(encode(text))``, and the same texts give the same tokenizer. No token is
added to the vocabulary of a base: embeddings would have to grow, and the model would no longer be the one that was
given.

A text is tokenised once, long before its prompt is known, and may be cut out of a longer one. The tokens at the
border depend on both: with many tokenizers "Query: " and "the" make "Query", ":", " the", which are not the tokens of
the one followed by those of the other. A model trained on the latter would meet the former only when it is used.
"""

import hashlib
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from gerund.data.corpus import clean_text, read_documents
from gerund.errors import ConfigError, OutputExistsError, TextError
from gerund.inference.text_ids import common_prefix_length, prompted, text_ids
from gerund.inference.tokens import InputFormat, Tokens, tokenize
from gerund.jobs.files import atomic_folder
from gerund.models.folder_files import demand_readable_files
from gerund.models.kinds import SEQ2SEQ
from gerund.models.sources import find
from gerund.settings.encoder import DEFAULT_MODEL
from gerund.training.corpus.texts import cache_folder, existing
from gerund.training.recipe import Recipe, TokenizerConfig

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
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on ``texts``.

    It puts BOS before every text and has bos, eos, pad and mask set. With ``sentinels`` it also has so many tokens
    ``<extra_id_0>``, ... for spans, and puts EOS after texts, as T5's do.
    """
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


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerFast:
    """Open a tokenizer folder that this module (or anyone) saved; ``default`` is that of the bundled model."""
    if str(folder) == DEFAULT_MODEL and not Path(folder).is_dir():
        folder = find(DEFAULT_MODEL).where
    if not (Path(folder) / "tokenizer.json").is_file():
        raise ConfigError(f"{folder}: no tokenizer.json there")
    demand_readable_files(Path(folder))
    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def prepare_tokenizer(recipe: Recipe) -> PreTrainedTokenizerFast:
    """Open the tokenizer of a new model, or train it, or take the one trained on the same data before."""
    settings = recipe.tokenizer or TokenizerConfig()
    if settings.path is not None:
        return load_tokenizer(settings.path)
    sources = []
    for source in recipe.data.sources:
        stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in existing(recipe, source.files)]
        sources.append((source.clean, source.weight, source.text_column, stamps))
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


def pick_mask_token(tokenizer: PreTrainedTokenizerBase, wanted: str | None) -> int:
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


def _single(tokenizer: PreTrainedTokenizerBase, text: str) -> int | None:
    # The vocabulary comes first: encoding "_" with SentencePiece gives "▁" and "_", or another token, "▁_".
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    if text in vocabulary:
        return vocabulary[text]
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False) if text else []
    return ids[0] if len(ids) == 1 and ids[0] != tokenizer.unk_token_id else None


# How many tokens of a text are looked at together with the prompt. Pre-tokenizers keep the effect within a word; where
# it goes on beyond half of this, the whole text is looked at.
_BORDER = 32


class InputFormatter:
    """Formats training texts for the model.

    Attributes:
        before: The special tokens before every text.
        overhead: How many tokens prompt and special tokens take.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        prompt: str = "",
        append_eos: bool = False,
        normalizes: bool = False,
    ) -> None:
        self.tokenizer, self.prompt, self.append_eos = tokenizer, prompt, append_eos
        self._format = InputFormat(prompt=prompt, append_eos=append_eos, normalizes=normalizes)
        # This is also where impossible settings are refused.
        [letter] = tokenize(tokenizer, ["a"], self._format)
        assert letter is not None
        self.before = letter.ids[: letter.specials_before]
        encoding = tokenizer("a", return_special_tokens_mask=True, verbose=False)
        added = encoding["special_tokens_mask"]
        after = next((place for place, flag in enumerate(reversed(added)) if not flag), 0)
        self._after = encoding["input_ids"][len(added) - after :]
        alone = text_ids(tokenizer, prompted(tokenizer, prompt))
        self._prompt = alone[len(self.before) : len(alone) - len(self._after)]
        self._ends_itself = self._after[-1:] == [tokenizer.eos_token_id]
        self.overhead = len(alone) + int(append_eos and not self._ends_itself)

    def format(self, ids: Sequence[int] | np.ndarray) -> Tokens:
        """Return a text, given as tokens without any special ones, as the model reads it.

        Where the tokenizer gives these very tokens for the text that they spell, the result is what
        :func:`gerund.inference.tokens.tokenize` makes of that text, cut to ``overhead + len(ids)`` tokens.

        The result has at most ``overhead + len(ids)`` tokens. One token may hold the end of the prompt and the
        beginning of the text: :meth:`places` says where the text is.
        """
        text = [int(token) for token in ids]
        if not text:
            raise TextError("a text without tokens cannot be formatted")
        start, text_from = self._join(text) if self.prompt else (None, 0)
        if start is None:
            start, text_from = [*self.before, *self._prompt, *text], len(self.before) + len(self._prompt)
        start = start[: len(self.before) + len(self._prompt) + len(text)]
        whole = start + self._after
        if self.append_eos and whole[-1] != self.tokenizer.eos_token_id:
            whole.append(self.tokenizer.eos_token_id)
        return Tokens(whole, text_from, len(self.before))

    def format_text(self, text: str, length: int | None) -> Tokens:
        """Return a text as the encoder reads it.

        It has at most ``length`` tokens, prompt and special tokens included; the end of a longer text is cut off
        without a warning.
        """
        if length is not None and length <= self.overhead:
            raise ConfigError(
                f"length {length} leaves no room for text: prompt and special tokens take {self.overhead}"
            )
        [tokens] = tokenize(self.tokenizer, [text], self._format)
        assert tokens is not None  # an empty text is an error
        if length is None or len(tokens) <= length:
            return tokens
        limited = replace(self._format, max_length=length)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\d+ of \d+ texts were longer than")
            [tokens] = tokenize(self.tokenizer, [text], limited)
        assert tokens is not None
        return tokens

    def places(self, formatted: Tokens) -> range:
        """Return where in a formatted text the text itself stands, without prompt and special tokens.

        A token that holds the end of the prompt and the beginning of the text belongs to the text. An EOS that the
        text ended with by itself is not counted where ``append_eos`` would have put one.
        """
        appended = self.append_eos and not self._ends_itself
        return range(formatted.text_from, len(formatted) - len(self._after) - int(appended))

    def _join(self, text: list[int]) -> tuple[list[int] | None, int]:
        """Return special tokens, prompt and text as tokenised together, and where the text begins; None if it cannot.

        Only the first tokens are read together with the prompt; what stays the same with and without it at their end
        shows how far its effect goes, and everything behind is taken over.
        """
        for size in (_BORDER, len(text)):
            piece = self.tokenizer.decode(text[:size], skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if not piece.strip():
                continue
            # Made of token ids: a mask token among them is one.
            [joint] = tokenize(self.tokenizer, [piece], InputFormat(prompt=self.prompt, parses_control=True))
            [alone] = tokenize(self.tokenizer, [piece], InputFormat(parses_control=True))
            assert joint is not None
            assert alone is not None
            together = joint.ids[: len(joint) - len(self._after)]
            single = alone.ids[alone.specials_before : len(alone) - len(self._after)]
            same = common_prefix_length(together[::-1], single[::-1])
            if same < size // 2 and size < len(text):
                continue
            changed = len(single) - same
            if single[:changed] != text[:changed]:
                break  # the tokens at the border are not what the tokenizer makes of their text
            return together[: len(together) - same] + text[changed:], joint.text_from
        return None, 0
