"""Encoder fingerprints: a hash of everything that affects the vectors."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from gerund.models.library_calls import ready_for_threads
from gerund.settings.encoder import RANKING, EncoderConfig

if TYPE_CHECKING:
    from torch import Tensor


def weights_hash(state: Mapping[str, "Tensor"]) -> str:
    """Return a hash of every weight, with names and shapes.

    Values count, not their type: a bfloat16 checkpoint that a processor without bfloat16 holds in float32 is
    the same encoder.
    """
    import torch

    def one(name: str) -> bytes:
        tensor = state[name].detach().cpu().contiguous()
        if tensor.dtype in (torch.bfloat16, torch.float16):
            tensor = tensor.float()
        digest = hashlib.blake2b(f"{name} {tuple(tensor.shape)}".encode(), digest_size=16)
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return digest.digest()

    ready_for_threads()
    # hashlib lets go of the interpreter lock, so tensors are hashed side by side; few, since each is copied.
    with ThreadPoolExecutor(max_workers=4) as pool:
        parts = list(pool.map(one, sorted(state)))
    return hashlib.blake2b(b"".join(parts), digest_size=16).hexdigest()


def files_hash(files: Sequence[Path], arithmetic: str) -> str:
    """Return a hash of packed weights: of their files, and of what is computed with them."""
    digest = hashlib.blake2b(arithmetic.encode(), digest_size=16)
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()


def adapter_hash(folder: Path | None) -> str:
    """Return a hash of an adapter's files; the empty string without an adapter."""
    if folder is None:
        return ""
    digest = hashlib.blake2b(digest_size=16)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def fingerprint(
    weights: str, adapter: str, config: EncoderConfig, n_layers: int, *, dimensions: int | None = None
) -> str:
    """Return the fingerprint of an encoder: 16 hexadecimal digits.

    Two encoders with the same fingerprint give the same vectors (up to rounding) for the same texts, prompts
    and dimensions; k and k0 that were left out count as what they came to.
    """
    settings = config.to_dict()
    settings["attention"] = config.with_defaults(n_layers).attention.to_dict()
    settings.pop("normalize")
    for name in (*RANKING, "similarity"):
        settings.pop(name, None)
    parts = [weights, adapter, json.dumps(settings, sort_keys=True), str(dimensions)]
    return hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()


def times_written(tensor: "Tensor") -> int:
    """Return how often a tensor was changed in place, as whoever trains a model does; 0 where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version
