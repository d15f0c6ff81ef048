"""Cache the tokenizers of GGUF files as ``tokenizer.json``: to build one with a large vocabulary takes seconds.

An entry belongs to a file's content, to the code that makes tokenizers, and to the versions of transformers and
tokenizers. One that was changed is made again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from gerund.errors import GerundError
from gerund.jobs.disk_cache import DiskCache, content_key, sha256_of, user_cache

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER, _SETTINGS = "tokenizer.json", "settings.json"
_MADE_BY = ("gguf_tokenizer.py", "tokenizer_cache.py")


@dataclass(frozen=True)
class TokenizerSettings:
    """What of a tokenizer is not in its ``tokenizer.json``.

    Attributes:
        special: special tokens by their names, such as ``eos_token``.
        extra: special tokens that have no name.
        ends: the ids of tokens that end a text.
        chat_template: the template of conversations; None without one.
        keywords: what transformers' class is made with.
    """

    special: Mapping[str, str]
    extra: Sequence[str]
    ends: Sequence[int]
    chat_template: str | None
    model_max_length: int
    padding_side: str
    keywords: Mapping[str, Any]


def settings_of(
    tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], keywords: Mapping[str, Any]
) -> TokenizerSettings:
    """Return the settings of a transformers tokenizer that was made with ``keywords``."""
    named = dict(tokenizer.special_tokens_map)
    extra = [token for token in tokenizer.all_special_tokens if token not in named.values()]
    template = tokenizer.chat_template or None
    return TokenizerSettings(
        named, extra, list(ends), template, tokenizer.model_max_length, tokenizer.padding_side, dict(keywords)
    )


class StoredTokenizer:
    """A GGUF file's place in the cache; this user's by default."""

    def __init__(self, path: Path, folder: Path | None = None) -> None:
        self.path, self.folder = path, user_cache("tokenizers") if folder is None else folder

    @cached_property
    def _place(self) -> tuple[DiskCache, str] | None:
        with suppress(GerundError, OSError):  # without a cache it is made each time
            return DiskCache(self.folder), content_key([self.path], self.folder, *_versions())
        return None

    def read(self) -> tuple[Tokenizer, TokenizerSettings] | None:
        """Return what is stored; None where nothing is, or what was changed."""
        entry = None if self._place is None else self._place[0].get(self._place[1])
        if entry is None:
            return None
        try:
            content = json.loads((entry / _SETTINGS).read_text(encoding="utf-8"))
            if sha256_of(entry / _TOKENIZER) != content["tokenizer"]:
                return None
            # From the file: the text of a large vocabulary would take its size in memory twice more.
            return Tokenizer.from_file(str(entry / _TOKENIZER)), TokenizerSettings(**content["settings"])
        except Exception:  # tokenizers have no errors of their own
            return None

    def keep(self, backend: Tokenizer, settings: TokenizerSettings) -> None:
        """Store a tokenizer, where that can be done."""

        def write(work: Path) -> None:
            backend.save(str(work / _TOKENIZER), pretty=False)
            content = {"settings": asdict(settings), "tokenizer": sha256_of(work / _TOKENIZER)}
            (work / _SETTINGS).write_text(json.dumps(content), encoding="utf-8")

        if self._place is not None:
            with suppress(GerundError, OSError, TypeError, ValueError):
                self._place[0].put(self._place[1], write)


@cache
def _versions() -> list[str]:
    """Return what decides which tokenizer a file has."""
    code = [sha256_of(Path(__file__).parent / name) for name in _MADE_BY]
    return [*code, version("transformers"), version("tokenizers")]
