"""Plans that were seen to reach every layer of a model, so that the same model need not be probed at each start.

A probe's result belongs to all that it depends on: the files of the weights as ``known_hashes`` describes them, the
config, the plan, device and attention, the versions of torch, transformers and gerund, and the code of both that takes
part. Only that a plan holds is kept; one that does not is probed, and refused, each time.

Knows: this user's caches. Does not know: how a model is probed.
"""

import hashlib
import inspect
from contextlib import suppress
from pathlib import Path

import torch
from transformers import PreTrainedModel

import gerund.attention
from gerund.errors import GerundError
from gerund.jobs.disk_cache import default_cache
from gerund.jobs.files import write_whole
from gerund.settings.plan import ResolvedPlan

_HOLDS = "every layer obeys the plan\n"


def probe_key(stamp: str, model: PreTrainedModel, plan: ResolvedPlan, *, adapters: str) -> str | None:
    """Return under what the result of a probe is kept; None where its code cannot be looked at.

    Args:
        stamp: what describes the files, type and versions of the weights (``known_hashes.stamp``).
        model: the model, with the weights of these files.
        plan: the plan.
        adapters: what says which adapters were put into it.
    """
    weight = model.get_input_embeddings().weight
    try:
        code = [Path(inspect.getfile(type(model))), *sorted(Path(gerund.attention.__file__).parent.glob("*.py"))]
        files = [f"{path} {(found := path.stat()).st_size} {found.st_mtime_ns}" for path in code]
    except (OSError, TypeError):
        return None
    parts = [stamp, repr(plan), model.config.to_json_string(use_diff=False), str(model.config._attn_implementation)]
    parts += [str(weight.device), str(weight.dtype), torch.__version__, adapters, *files]
    return hashlib.blake2b("\n".join(parts).encode(errors="surrogateescape"), digest_size=16).hexdigest()


def is_known(key: str) -> bool:
    """Tell whether a probe was passed before; what cannot be read, or was written by something else, says nothing."""
    try:
        return _place(key).read_text(encoding="ascii") == _HOLDS
    except (OSError, ValueError):
        return False


def note(key: str) -> None:
    """Note that a probe was passed, where it can be noted."""
    with suppress(OSError, GerundError):
        place = _place(key)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, _HOLDS)


def _place(key: str) -> Path:
    return default_cache("probes") / key
