"""Load the same model in the workers of a job as in the driver."""

import os
import platform
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gerund.errors import ConfigError, FingerprintError
from gerund.models.light_runtime import usual_threads
from gerund.models.sources import with_absolute_paths
from gerund.settings.model_spec import ModelSpec

if TYPE_CHECKING:
    from gerund.inference.sentence_encoder import SentenceEncoder
    from gerund.language_model import LanguageModel

MOST_THREADS = 1024


@dataclass(frozen=True)
class WorkerModel:
    """The model that a worker loads, and what identifies it."""

    spec: ModelSpec  # loads it
    fingerprint: str
    dtype: str  # the dtype it computes in
    gpus: float = 0.0  # number of GPUs it needs
    threads: int = 1  # number of CPU threads

    @classmethod
    def of(
        cls, lm: "LanguageModel | SentenceEncoder", spec: ModelSpec | None = None, *, threads: int | None = None
    ) -> Self:
        """Return what loads the same model in other processes.

        Args:
            lm: the model.
            spec: what it was loaded by; None for the model's own spec.
            threads: CPU threads per worker; None for one.

        Raises:
            ConfigError: the model was made in memory, or is run by sentence-transformers; or fewer than one thread.

        >>> lm = gerund.load()
        >>> WorkerModel.of(lm).load().fingerprint() == lm.fingerprint()
        True
        """
        from gerund.inference.sentence_encoder import SentenceEncoder

        if isinstance(lm, SentenceEncoder):
            raise ConfigError(f"{lm.name} embeds in one process; leave out --workers")
        spec = lm.spec if spec is None else spec
        dtype = str(lm.compute_dtype).removeprefix("torch.")
        gpus = 1.0 if lm.runtime.device_type == "cuda" else 0.0
        return cls(with_absolute_paths(spec), lm.fingerprint(), dtype, gpus, checked_threads(threads) or 1)

    def load(self) -> "LanguageModel":
        """Load the model in this process, and set the number of threads.

        Raises:
            FingerprintError: this machine has another model.
            ConfigError: it computes in another dtype here.
            GerundError: as ``gerund.load``.
        """
        from gerund.entry import load  # which imports torch

        use_threads(self.threads)
        lm = load(self.spec)
        machine = platform.node() or "a machine"
        if lm.fingerprint() != self.fingerprint:
            raise FingerprintError(
                f"{machine} works on this job and has another model at {self.spec.model} (fingerprint "
                f"{lm.fingerprint()}, not {self.fingerprint}); put the same there, or on storage that all share"
            )
        if (dtype := str(lm.compute_dtype).removeprefix("torch.")) != self.dtype:
            raise ConfigError(f"{machine} computes in {dtype} and this machine in {self.dtype}; give --dtype float32")
        return lm


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads of this process; None keeps it."""
    if checked_threads(threads) is None:
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)  # for torch, if it is imported later, and for packed networks
    if sys.modules.get("torch") is not None:
        import torch

        torch.set_num_threads(threads or 1)


def used_threads() -> int:
    """Return the number of CPU threads that this process computes with."""
    if sys.modules.get("torch") is not None:
        import torch

        return torch.get_num_threads()
    return usual_threads() or os.cpu_count() or 1


def checked_threads(threads: int | None) -> int | None:
    """Return a number of threads, or raise ``ConfigError`` for an impossible one."""
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads} leaves nothing to compute with")
    if threads is not None and threads > MOST_THREADS:
        raise ConfigError(f"threads={threads} is more than the {MOST_THREADS} that a process may have")
    return threads
