"""Where the texts of a training come from: the recipe's sources as token caches, the tokenizer of a new model.

Knows: the recipe's data section, token caches. Does not know: models, objectives.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gerund.data.corpus import clean_text, read_documents
from gerund.errors import ConfigError
from gerund.jobs.folders import atomic_folder
from gerund.models.encoder_decoder import SEQ2SEQ
from gerund.training.corpus.token_cache import TokenCache, Unit, tokenize_corpus
from gerund.training.corpus.tokenizer import load_tokenizer, train_tokenizer
from gerund.training.recipe import Recipe, SourceConfig, TokenizerConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

# As many as T5 has.
_SENTINELS = 100


class Sources:
    """The recipe's sources, tokenised when they are asked for and kept on the disk.

    Args:
        recipe: The settings.
        tokenizer: The model's tokenizer.
        tell: Told what takes long.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.recipe, self.tokenizer, self.tell = recipe, tokenizer, tell
        self.opened: dict[str, TokenCache] = {}

    def chosen(self, names: list[str]) -> list[SourceConfig]:
        """Return the sources of these names; all where there are none."""
        return [source for source in self.recipe.data.sources if not names or source.name in names]

    def training(self, names: list[str], *, unit: Unit = "documents", min_words: int = 0) -> list[TokenCache]:
        """Return the training texts of these sources."""
        return [self._tokens(source, source.files, unit, min_words) for source in self.chosen(names)]

    def validation(
        self, names: list[str], *, unit: Unit = "documents", min_words: int = 0
    ) -> tuple[list[SourceConfig], list[TokenCache]]:
        """Return which of these sources have validation texts, and the texts."""
        found = [source for source in self.chosen(names) if source.validation]
        return found, [self._tokens(source, source.validation, unit, min_words) for source in found]

    def summary(self) -> dict[str, list[int]]:
        """Return what must agree for a resume: the counts of every cache that was opened."""
        return {name: cache.summary() for name, cache in sorted(self.opened.items())}

    def _tokens(self, source: SourceConfig, files: list[Path], unit: Unit, min_words: int) -> TokenCache:
        part = "training" if files is source.files else "validation"
        name = f"{source.name} {part} {unit} {min_words}"
        if name not in self.opened:
            self.opened[name] = tokenize_corpus(
                existing(self.recipe, files),
                self.tokenizer,
                cache_folder(self.recipe),
                clean=source.clean,
                text_column=source.text_column,
                unit=unit,
                min_words=min_words,
                limit=source.limit if part == "training" else None,
                begins=lambda: self.tell(f"tokenising the {part} {unit} of {source.name}"),
            )
        return self.opened[name]


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
        with atomic_folder(folder) as partial:
            tokenizer.save_pretrained(str(partial))
    # Read back also when just trained, so that the first run and a resumed one use the very same object.
    return load_tokenizer(folder)


def sentinels_of(recipe: Recipe) -> int:
    """Return how many sentinels the tokenizer of a new model has: those of a T5."""
    return _SENTINELS if (recipe.model.config or {}).get("model_type") in SEQ2SEQ else 0


def existing(recipe: Recipe, files: list[Path], *, texts: bool = True) -> list[Path]:
    """Return the paths of the recipe's files, which hold texts, or pairs or passages.

    Raises:
        ConfigError: One of them is not there.
    """
    paths = [recipe.data.folder / file for file in files]
    for path in paths:
        if not path.is_file():
            own = ", and --texts names texts of your own" if texts else ", where such files are looked for"
            raise ConfigError(f"{path}: no such file; data.folder is {str(recipe.data.folder)!r}{own}")
    return paths


def cache_folder(recipe: Recipe) -> Path:
    """Return where tokens are kept."""
    return recipe.data.cache or recipe.output / "cache"


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


def _stamps(recipe: Recipe, files: list[Path]) -> list[tuple[str, int]]:
    return [(path.name, path.stat().st_size) for path in existing(recipe, files)]
