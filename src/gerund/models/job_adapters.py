"""Which adapter is active for which job: encoding, filling in, scoring continuations.

Knows: PEFT folders, ``gerund.json``. Does not know: how an adapter is put into a model.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path

from gerund.config import JOBS, Job
from gerund.models.adapters import ADAPTER_FILES, check_folder
from gerund.models.fingerprint import adapter_hash

_PLACE = "adapter"


class Adapters:
    """A model's PEFT folders by what they are active for; a job without one is done by the untouched model.

    Args:
        folders: where the adapter of a job lies; several jobs may share one.

    Raises:
        DataError: a folder holds no adapter.
    """

    def __init__(self, folders: Mapping[Job, Path] | None = None) -> None:
        self.folders = dict(folders or {})
        for folder in set(self.folders.values()):
            check_folder(folder)
        # Now, not when it is asked for: the files may have changed by then.
        self._hashes = {job: adapter_hash(folder) for job, folder in self.folders.items()}

    @classmethod
    def shared(cls, folder: Path) -> "Adapters":
        """Return one adapter that is active for every job."""
        return cls(dict.fromkeys(JOBS, folder))

    def name(self, job: Job) -> str | None:
        """Return the name under which this job's adapter lies in the model: that of its first job; None for none."""
        folder = self.folders.get(job)
        return None if folder is None else next(first for first in JOBS if self.folders.get(first) == folder)

    def hash(self, job: Job) -> str:
        """Return the hash of this job's adapter; the empty string without one."""
        return self._hashes.get(job, "")

    @property
    def by_name(self) -> dict[str, Path]:
        """Where each of them lies, by name; a shared one stands here once."""
        return {name: self.folders[job] for job in JOBS if (name := self.name(job)) == job}

    def copy_into(self, folder: Path) -> dict[Job, str | None]:
        """Copy them into folders of a model's folder.

        Returns:
            The place of each job's, relative to the model's folder.
        """
        places: dict[str, str] = {}
        for name, source in self.by_name.items():
            places[name] = _PLACE if name == JOBS[0] else f"{_PLACE}-{name}"
            (folder / places[name]).mkdir()
            for file in ADAPTER_FILES:
                shutil.copyfile(source / file, folder / places[name] / file)
        return {job: places.get(self.name(job) or "") for job in JOBS}
