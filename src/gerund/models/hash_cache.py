"""Cache weight hashes and verified attention plans, so that large checkpoints are hashed and probed only once.

A hash belongs to files as the file system describes them: path, size, times of the last write and of the last change,
which no program can set back. A file whose content was changed or replaced gets another description, regardless of its
name, size and date. Callers check that tensors weren't changed after loading, which the files don't show.

The result of a probe belongs to all that it depends on: the files of the weights, the config, the plan, device and
attention implementation, the versions of torch, transformers and gerund, and the code of both that is used. Only passed
probes are cached; a plan that fails is probed again, and fails, each time.
"""

import hashlib
import inspect
import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

import gerund.attention
import gerund.settings
from gerund.attention.layouts import is_one_graph
from gerund.errors import GerundError
from gerund.jobs.disk_cache import user_cache
from gerund.jobs.files import write_atomic
from gerund.models.adapters import base_state
from gerund.models.fingerprint import files_hash, times_written, weights_hash
from gerund.models.runtimes import packed_in
from gerund.settings.plan import ResolvedPlan
from gerund.version import __version__

LEAST_BYTES = 1 << 22
"""Smaller weights are hashed each time: that takes a hundredth of a second."""

_HASH = re.compile(r"[0-9a-f]{32}")
_PASSED = "every layer obeys the plan\n"


def describe_files(files: Sequence[Path]) -> str:
    """Return how the file system describes files; empty where they are small or can't be read."""
    try:
        stats = [(str(path.resolve()), path.stat()) for path in files]
    except OSError:
        return ""
    if sum(stat.st_size for _, stat in stats) < LEAST_BYTES:
        return ""
    return "\n".join(
        f"{name} {stat.st_dev} {stat.st_ino} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns}"
        for name, stat in stats
    )


def weights_key(description: str, *how: str) -> str | None:
    """Return the cache key of the weights in described files; None where there is no description.

    ``how`` is what else decides which tensors they become, such as their dtype.
    """
    if not description:
        return None
    return _key(description, *how, transformers.__version__, __version__)


def cached_hash(key: str) -> str | None:
    """Return the hash of the weights with this key; None where none is cached."""
    hashed = _read("weights", key)
    return hashed if _HASH.fullmatch(hashed) else None


def cache_hash(key: str, hashed: str) -> None:
    """Cache the hash of the weights with this key, where the cache can be written."""
    _write("weights", key, hashed)


def probe_key(weights: str, model: PreTrainedModel, plan: ResolvedPlan, *, adapters: str) -> str | None:
    """Return the cache key of a probe of ``model``; None where its code can't be read.

    ``weights`` is the key of its weights, ``adapters`` the hashes of the adapters in it.
    """
    weight = model.get_input_embeddings().weight
    try:
        code = [Path(inspect.getfile(type(model)))]
        for package in (gerund.attention, gerund.settings):
            code += sorted(Path(str(package.__file__)).parent.glob("*.py"))
        files = [f"{path} {(stat := path.stat()).st_size} {stat.st_mtime_ns}" for path in code]
    except (OSError, TypeError):
        return None
    parts = [weights, repr(plan), model.config.to_json_string(use_diff=False), str(model.config._attn_implementation)]
    parts += [str(weight.device), str(weight.dtype), torch.__version__, adapters, *files]
    return _key(*parts)


def probe_passed(key: str) -> bool:
    """Whether a probe with this key was passed before; an unreadable or foreign file counts as no."""
    return _read("probes", key) == _PASSED


def cache_passed_probe(key: str) -> None:
    """Record that a probe was passed, where the cache can be written."""
    _write("probes", key, _PASSED)


class CachedWeightsHash:
    """The hash of a model's weights, computed once for as long as no tensor is changed in place.

    ``files_key`` is that of ``weights_key``, where the tensors are those of the files; the hash is then cached on disk.
    """

    def __init__(self, model: PreTrainedModel, files_key: str | None) -> None:
        self._model, self._files_key = model, files_key
        self._hashed: tuple[int, str] | None = None
        self._changes_loaded = 0 if files_key is None else self._changes()

    def _changes(self) -> int:
        """Return how often tensors were changed in place, which each of them counts; packed ones never are."""
        return (
            0
            if is_one_graph(self._model)
            else sum(times_written(tensor) for tensor in base_state(self._model).values())
        )

    @property
    def files_key(self) -> str | None:
        """The key of the files; None without any, or after a tensor was changed."""
        return self._files_key if self._files_key is None or self._changes() == self._changes_loaded else None

    def value(self) -> str:
        """Return the hash of the weights as they are now."""
        changes = self._changes()
        if self._hashed is None or self._hashed[0] != changes:
            self._hashed = changes, self._hash()
        return self._hashed[1]

    def _hash(self) -> str:
        key = self.files_key
        hashed = None if key is None else cached_hash(key)
        if hashed is None:
            packed = is_one_graph(self._model)
            hashed = files_hash(*packed_in(self._model)) if packed else weights_hash(base_state(self._model))
            if key is not None:
                cache_hash(key, hashed)
        return hashed


def _key(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def _read(kind: str, key: str) -> str:
    try:
        return (user_cache(kind) / key).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def _write(kind: str, key: str, text: str) -> None:
    with suppress(OSError, GerundError):
        path = user_cache(kind) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text)
