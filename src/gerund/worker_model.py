"""Load the same model in the workers of a job as in the driver."""

import platform
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gerund.entry import load
from gerund.errors import ConfigError, FingerprintError
from gerund.models.sources import with_absolute_paths
from gerund.settings.model_spec import ModelSpec

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel

MOST_THREADS = 1024


@dataclass(frozen=True)
class WorkerModel:
    """Which model a worker loads, and what tells that it is the same.

    Attributes:
        spec: loads it.
        fingerprint: what it has to have.
        dtype: what it has to compute in.
        gpus: GPUs that it needs for itself.
        threads: cores that it computes on.
    """

    spec: ModelSpec
    fingerprint: str
    dtype: str
    gpus: float = 0.0
    threads: int = 1

    @classmethod
    def of(cls, lm: "LanguageModel", spec: ModelSpec | None = None, *, threads: int | None = None) -> Self:
        """Return what loads a model elsewhere as it is here.

        Args:
            lm: the model.
            spec: what it was loaded by; None asks the model.
            threads: cores that each worker computes on; None for one.

        Raises:
            ConfigError: it was made in memory, so that nothing says where it comes from; or fewer than one thread.

        >>> lm = gerund.load()
        >>> WorkerModel.of(lm).load().fingerprint() == lm.fingerprint()
        True
        """
        spec = lm.spec if spec is None else spec
        dtype = str(lm.compute_dtype).removeprefix("torch.")
        gpus = 1.0 if lm.device.type == "cuda" else 0.0
        return cls(with_absolute_paths(spec), lm.fingerprint(), dtype, gpus, checked_threads(threads) or 1)

    def load(self) -> "LanguageModel":
        """Load the model in this process, which it then sets to its number of threads.

        Raises:
            FingerprintError: it is another one here.
            ConfigError: it computes in another type here.
            GerundError: as ``gerund.load``.
        """
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
    """Let this process compute on so many cores; None leaves it as it is.

    Raises:
        ConfigError: fewer than one.
    """
    if checked_threads(threads) is not None:
        import torch

        torch.set_num_threads(threads or 1)


def checked_threads(threads: int | None) -> int | None:
    """Return a number of threads.

    Raises:
        ConfigError: fewer than one, or more than any machine has.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads={threads} leaves nothing to compute with")
    if threads is not None and threads > MOST_THREADS:
        raise ConfigError(f"threads={threads} is more than the {MOST_THREADS} that a process may have")
    return threads
