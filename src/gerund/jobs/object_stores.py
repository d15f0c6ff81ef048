"""Read inputs from and write outputs to object stores (S3, GCS, ...), by local copies for the time of a job.

Inputs are copied into the working folder, and not again while they are unchanged in the store. Outputs are made in that
folder, with the parts of an unfinished job, and uploaded when they are complete. On a cluster it must be a folder that
all machines share.
"""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from gerund import checks
from gerund.errors import (
    ConfigError,
    DataError,
    GerundError,
    InputError,
    MissingDependencyError,
    OutputExistsError,
    ResourceError,
)
from gerund.jobs.files import atomic_file, make_folder, require_new_files, require_regular_file, write_atomic
from gerund.progress import progress

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_PIECE = 2**20
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


def is_url(path: str | Path) -> bool:
    """Return whether a path is on an object store.

    >>> is_url("s3://bucket/notes.jsonl"), is_url("notes.jsonl")
    (True, False)
    """
    return _URL.match(str(path)) is not None


@dataclass(frozen=True)
class Staged:
    """Local paths that a job reads and writes."""

    sources: list[str]  # the inputs, in their order
    output: Path
    target: str | None  # where the output is uploaded to; None where it is written directly
    places: tuple[str, ...] = ()  # targets of all files that may come with the output

    def send(self, files: Sequence[Path]) -> list[str]:
        """Upload finished files, the main one last; returns their targets. After an error the files stay here."""
        if self.target is None:
            return [str(file) for file in files]
        folder = "".join(self.target.rpartition("/")[:2])
        targets = [f"{folder}{file.name}" for file in files]
        for file, target in zip(files, targets, strict=True):
            _send(file, target)
        # Such as the errors file of an earlier run whose output is replaced.
        for target in set(self.places).difference(targets):
            _remove(target)
        for file in files:
            file.unlink()
        with suppress(OSError):
            self.output.parent.rmdir()
        return targets


@contextmanager
def staged(
    sources: Sequence[str],
    output: str | Path,
    *,
    work: Path | None = None,
    force: bool = False,
    files: Callable[[Path], Sequence[Path]] = lambda output: [output],
    outside: bool = False,
) -> Iterator[Staged]:
    """Yield local paths for a job; inputs on object stores have local copies until the block ends.

    After an error the copies stay, so that the same command needn't download them again. A URL may be that of a folder.

    Args:
        sources: paths and URLs.
        output: a path or URL.
        work: the folder for copies and unfinished parts; default: that of ``output``, or the current one for a URL.
        force: replace what is at ``output``.
        files: returns all files that may come with the output of a name, itself included.
        outside: whether the output must not be in a folder that is read.
    """
    name = PurePosixPath(str(output)).name
    target = str(output) if is_url(output) or work is not None else None
    if target is not None and not name:
        raise ConfigError(f"{output} is a folder; name a file in it as the output")
    folder = (work or (Path() if target else Path(output).absolute().parent)).absolute()
    local = Path(output) if target is None else checks.place("the output", folder / f"{name}.unsent" / name)
    targets = _targets(target, files) if target is not None else ()
    if target is not None:
        for path in targets:
            _require_apart(path, sources, outside=outside)
            _require_new(path, force=force)
        if local.exists() and not force:
            raise OutputExistsError(
                f"{local} was made by an earlier run and did not reach {target}; copy it there, or give --force to "
                "make it again"
            )
        make_folder(local.parent)
    copies = folder / f"{name}.inputs"
    try:
        yield Staged([_download(path, copies) if is_url(path) else path for path in sources], local, target, targets)
    finally:
        if target is not None:
            with suppress(OSError):  # with an output that was not uploaded, or parts
                local.parent.rmdir()
    shutil.rmtree(copies, ignore_errors=True)


def _targets(target: str, files: Callable[[Path], Sequence[Path]]) -> tuple[str, ...]:
    folder, slash, name = target.rpartition("/")
    return tuple(f"{folder}{slash}{file.name}" for file in files(Path(name)))


def _require_apart(target: str, sources: Sequence[str], *, outside: bool) -> None:
    """Raise ``InputError`` for an output that is an input, or in an input folder."""
    for source in sources:
        if is_url(target) or is_url(source):
            is_same, is_inside = target == source.rstrip("/"), target.startswith(source.rstrip("/") + "/")
        else:
            here, there = Path(target), Path(source)
            is_same = here.exists() and there.exists() and here.samefile(there)
            is_inside = there.is_dir() and here.resolve().is_relative_to(there.resolve())
        if is_same:
            raise InputError(f"{target} is the input itself; choose another output")
        if is_inside and outside:
            raise InputError(f"{target} would lie in the folder that is read; choose a place outside of {source}")


def _require_new(target: str, *, force: bool) -> None:
    if is_url(target):
        with _store(target) as (system, path):
            if not force and system.exists(path):
                raise OutputExistsError(f"{target} exists already; choose another name or give --force to replace it")
        return
    require_regular_file(Path(target))
    if not force:
        require_new_files(Path(target))


def _remove(target: str) -> None:
    if not is_url(target):
        Path(target).unlink(missing_ok=True)
        return
    with _store(target) as (system, path):
        if system.exists(path):
            system.rm_file(path)


def _send(file: Path, target: str) -> None:
    if not is_url(target):
        make_folder(Path(target).absolute().parent)
        with atomic_file(Path(target)) as copy, file.open("rb") as source:
            shutil.copyfileobj(source, copy, _PIECE)
        return
    with _store(target) as (system, path):
        # A store shows an object only when all of it has arrived.
        system.put_file(str(file), path)


def _download(url: str, copies: Path) -> str:
    """Copy what is at a URL, unless an earlier run's copy is still the same; returns the copy's path."""
    with _store(url) as (system, path):
        path = path.rstrip("/")
        digest = hashlib.blake2b(url.encode(), digest_size=4).hexdigest()
        copy = checks.place("the input", copies / digest / PurePosixPath(path).name)
        if not system.exists(path):
            raise DataError(f"{url}: no such file or folder")
        files = [name for name in sorted(system.find(path)) if not PurePosixPath(name).name.startswith(".")]
        is_folder, current = system.isdir(path), set[Path]()
        if is_folder:
            make_folder(copy)
        with progress(len(files), "fetching") as advance:
            for name in files:
                below = name.lstrip("/")[len(path.lstrip("/")) :].lstrip("/")
                if ".." in PurePosixPath(below).parts:
                    raise DataError(f"{url}: a name in it leads out of it: {below}")
                file = copy / below if is_folder else copy
                _download_file(system, name, file)
                current |= {file, _state_file(file)}
                advance(1)
        if is_folder:
            # What an earlier, unfinished job copied and is gone from the store since.
            for file in copy.rglob("*"):
                if file.is_file() and file not in current:
                    file.unlink()
    return str(copy)


def _state_file(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}.state")


def _download_file(system: Any, path: str, copy: Path) -> None:
    state = _state_file(copy)
    now = str(system.ukey(path))
    if copy.is_file() and state.is_file() and state.read_text(encoding="utf-8") == now:
        return
    make_folder(copy.parent)
    with system.open(path, "rb") as source, atomic_file(copy) as file:
        shutil.copyfileobj(source, file, _PIECE)
    write_atomic(state, now)


@contextmanager
def _store(url: str) -> Iterator[tuple[Any, str]]:
    """Yield the file system of a URL and its path there; errors of the store become ``ResourceError``."""
    import fsspec

    protocol = url.partition("://")[0]
    try:
        system, path = fsspec.core.url_to_fs(url)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        how = f": pip install {package}" if package else f" ({error})"
        raise MissingDependencyError(f"{protocol}:// needs an additional package{how}") from error
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from error
    try:
        yield system, path
    except GerundError:
        raise
    except Exception as error:  # each store has errors of its own, for keys, networks and names
        raise ResourceError(f"{url}: {getattr(error, 'strerror', None) or error or type(error).__name__}") from error
