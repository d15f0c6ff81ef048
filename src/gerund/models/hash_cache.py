"""Cache weight hashes and verified attention plans, so that large checkpoints are hashed and probed only once.

``fingerprint`` says which files a hash belongs to. Callers check that tensors weren't changed after loading, which the
files don't show.

The result of a probe belongs to all that it depends on: the files of the weights, the config, the plan, device and
attention implementation, the versions of torch, transformers and gerund, and the code of both that is used. Only passed
probes are cached; a plan that fails is probed again, and fails, each time.
"""

import inspect
from pathlib import Path

import torch
from transformers import PreTrainedModel

import gerund.attention
import gerund.settings
from gerund.attention.layouts import is_one_graph
from gerund.models.adapters import base_state
from gerund.models.fingerprint import cache_key, cached_hash, files_hash, times_written, weights_hash
from gerund.models.runtimes import packed_in
from gerund.settings.plan import ResolvedPlan


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
    return cache_key(*parts)


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
            self._hashed = changes, cached_hash(self.files_key, self._hash)
        return self._hashed[1]

    def _hash(self) -> str:
        packed = is_one_graph(self._model)
        return files_hash(*packed_in(self._model)) if packed else weights_hash(base_state(self._model))
