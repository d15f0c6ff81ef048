"""The recipe's sources as token caches, and texts and packed blocks of them.

Knows: the recipe's data section, token caches. Does not know: models, what objectives do with texts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gerund.errors import ConfigError
from gerund.jobs.manifest import InputFiles
from gerund.training.corpus.texts import PackedBlocks, SpreadBlocks, Texts
from gerund.training.corpus.token_cache import TokenCache, Unit, tokenize_corpus
from gerund.training.objectives.base import TextConfig
from gerund.training.recipe import Recipe, SourceConfig

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FILES = "files"
"""Where the summary has files; caches have names of several words."""


class Sources:
    """The recipe's sources, tokenised when they are asked for and kept on the disk.

    Args:
        recipe: The settings.
        tokenizer: The model's tokenizer.
        report: Called with what takes long.
    """

    def __init__(
        self, recipe: Recipe, tokenizer: "PreTrainedTokenizerBase", report: Callable[[str], None] = lambda _: None
    ) -> None:
        self.recipe, self.tokenizer, self.report = recipe, tokenizer, report
        self.opened: dict[str, TokenCache] = {}
        self.read: dict[str, list[Path]] = {}

    @property
    def cache(self) -> Path:
        """Where tokens are kept, and what objectives make of texts."""
        return cache_folder(self.recipe)

    def chosen(self, names: list[str]) -> list[SourceConfig]:
        """Return the sources of these names; all where there are none."""
        return [source for source in self.recipe.data.sources if not names or source.name in names]

    def texts(self, config: TextConfig, length: int, seed: int) -> Texts:
        """Return training texts of an objective, at most ``length`` tokens each."""
        sources = self.chosen(config.sources)
        caches = [self._tokens(source, source.files, config.unit, config.min_words) for source in sources]
        return self._texts(sources, caches, config, length, seed)

    def validation_texts(self, config: TextConfig, length: int, seed: int) -> Texts | None:
        """Return validation texts of an objective; None where its sources have none."""
        sources = self._validated(config.sources)
        caches = [self._tokens(source, source.validation, config.unit, config.min_words) for source in sources]
        return self._texts(sources, caches, config, length, seed) if sources else None

    def blocks(self, names: list[str], length: int, seed: int) -> PackedBlocks:
        """Return packed training blocks of these sources."""
        sources = self.chosen(names)
        caches = [self._tokens(source, source.files, "documents", 0) for source in sources]
        return PackedBlocks(caches, [source.weight for source in sources], length=length, seed=seed)

    def validation_blocks(self, names: list[str], length: int, rows: int) -> dict[str, SpreadBlocks]:
        """Return validation blocks of each of these sources that has any, in groups of ``rows``."""
        sources = self._validated(names)
        caches = [self._tokens(source, source.validation, "documents", 0) for source in sources]
        limit = self.recipe.data.validation_tokens
        named = zip(sources, caches, strict=True)
        return {source.name: SpreadBlocks(cache, length=length, rows=rows, limit=limit) for source, cache in named}

    def reads(self, name: str, files: list[Path]) -> None:
        """Take note of files that an objective reads by itself, which the recipe has as ``name``."""
        self.read[name] = files

    def summary(self) -> dict[str, Any]:
        """Return what must agree for a resume: the counts of every cache, and the content of every other file.

        Every file is read once for it, a piece at a time.

        Raises:
            DataError: A file cannot be read any more.
        """
        summary: dict[str, Any] = {name: cache.summary() for name, cache in sorted(self.opened.items())}
        if self.read:
            summary[FILES] = {name: _content(files) for name, files in sorted(self.read.items())}
        return summary

    def _validated(self, names: list[str]) -> list[SourceConfig]:
        return [source for source in self.chosen(names) if source.validation]

    @staticmethod
    def _texts(
        sources: list[SourceConfig], caches: list[TokenCache], config: TextConfig, length: int, seed: int
    ) -> Texts:
        weights = [source.weight for source in sources]
        return Texts(caches, weights, length=length, seed=seed, min_tokens=min(config.shortest_text, length))

    def _tokens(self, source: SourceConfig, files: list[Path], unit: Unit, min_words: int) -> TokenCache:
        trains = files is source.files
        part = "training" if trains else "validation"
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
                part=source.part if trains else "1/1",
                limit=source.limit if trains else None,
                begins=lambda: self.report(f"tokenising the {part} {unit} of {source.name}"),
            )
        return self.opened[name]


def _content(files: list[Path]) -> list[int | str]:
    """Return size and digest of files together."""
    return [sum(path.stat().st_size for path in files), InputFiles(files).digest]


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
