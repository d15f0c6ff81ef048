"""Cache built ONNX graphs on disk, with weights laid out for this processor, and map them into memory.

Mapped weights take no memory of a process, and processes share them. An entry belongs to a file's content, to the code
that builds graphs, to ONNX Runtime's version and to the processor. It appears as a whole or not at all, and one that
was changed afterward is built again.
"""

import ctypes
import json
import mmap
import platform
import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import onnxruntime as ort

from gerund import gguf_architectures
from gerund.errors import GerundError, ModelError, ResourceError
from gerund.jobs.disk_cache import DiskCache, content_key, key_of, sha256_of, stamp_of
from gerund.jobs.files import atomic_file, write_atomic
from gerund.progress import say_once

if TYPE_CHECKING:  # onnx is imported only to build: it takes 20 MB
    from gerund.packed.graph import GraphBuilder

MOST_BYTES = 20 * 10**9
"""Default size of the cache."""
_TAKES_A_WHILE = 2**25  # bytes of weights

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_GRAPH, _WEIGHTS, _CONTENT, _SEEN = "model.onnx", "model.bin", "content.json", "seen.json"
_PROVIDERS = ["CPUExecutionProvider"]
# The addresses of a file's mapping, and the lines that follow with its sizes.
_MAPPING = r"^([0-9a-f]+)-([0-9a-f]+) .* {}\n((?:\w+:.*\n)+)"
# ONNX Runtime's own errors have no common root but Exception.
_CLASSES = [value for value in vars(ort.capi.onnxruntime_pybind11_state).values() if isinstance(value, type)]
_REFUSED: tuple[type[Exception], ...] = (RuntimeError, *(value for value in _CLASSES if issubclass(value, Exception)))


@dataclass(frozen=True)
class Part:
    """Some successive layers of a graph.

    Attributes:
        ends: the outputs that are wanted.
        start: the state that replaces all lower layers as an input; other outputs of its node become inputs too.
        end: the state that the layers above start from; other outputs of its node become outputs too.
    """

    ends: tuple[str, ...]
    start: str | None = None
    end: str | None = None


def open_session(
    sources: Sequence[Path],
    variant: str,
    build: Callable[[], "GraphBuilder"],
    threads: int | None,
    folder: Path,
    part: Part | None = None,
    *,
    arena: bool = True,
) -> ort.InferenceSession:
    """Return the session of a graph, from the cache or built and cached.

    Args:
        sources: the files that the graph is built from.
        variant: what distinguishes it from other graphs of these files.
        build: builds it.
        threads: how many threads a run uses; None for one per core.
        folder: the cache's.
        part: what of the graph is wanted, if not all; the weights stay in one file.
        arena: whether memory of a run is kept for the next one, unless the run hands it back; only outputs in memory
            of the caller are no part of it.

    Raises:
        ModelError: ONNX Runtime refuses the graph, because its weights do not fit together.
    """
    store = DiskCache(folder, MOST_BYTES)
    try:
        key = content_key(sources, folder, variant, _code(), ort.__version__, processor())
        for _ in range(2):
            entry = store.get(key)
            if entry is not None and _intact(entry):
                with suppress(*_REFUSED):
                    graph = str(entry / _GRAPH) if part is None else _part_of(entry, part)
                    options = _options(threads, built=True, arena=arena)
                    options.add_session_config_entry(_WEIGHTS_FOLDER, str(entry))
                    session = ort.InferenceSession(graph, options, providers=_PROVIDERS)
                    release_pages(entry / _WEIGHTS)
                    return session
            if sum(path.stat().st_size for path in sources) >= _TAKES_A_WHILE:
                named = sources[0].parent if sources[0].suffix == ".json" else sources[0]
                say_once(f"preparing {named.name} to run packed")
            store.put(key, lambda work: _write(build(), work, sources[0]))
        raise ResourceError(f"{folder} did not keep it")
    except (ResourceError, OSError) as error:
        warnings.warn(f"could not cache the graph of {sources[0].name}, which stays in memory: {error}", stacklevel=2)
    return _in_memory(build(), _options(threads, arena=arena), sources[0], part)


def release_pages(file: Path) -> None:
    """Take the pages of a mapped file out of this process's memory; those in use come back from the page cache.

    ONNX Runtime reads all of the weights as it opens a graph, and never again those parts that it has laid out anew.
    Only Linux is asked.
    """
    try:
        mappings = Path("/proc/self/smaps").read_text(errors="replace")
    except OSError:
        return
    for start, end, sizes in re.findall(_MAPPING.format(re.escape(str(file))), mappings, re.MULTILINE):
        if re.search("^Anonymous: +0 kB$", sizes, re.MULTILINE):  # else pages were written, and would be lost
            size = int(end, 16) - int(start, 16)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(int(start, 16)), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _options(threads: int | None, *, built: bool = False, arena: bool = True) -> ort.SessionOptions:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads or 0
    options.log_severity_level = 3
    options.enable_cpu_mem_arena = arena
    if built:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def _write(builder: "GraphBuilder", work: Path, source: Path) -> None:
    """Fill an entry: ONNX Runtime optimizes the graph, and writes it with the weights as it multiplies them."""
    from gerund.packed.graph import write_weights

    model, arrays = builder.model("plain.bin")
    plain = work / "plain.onnx"
    with (work / "plain.bin").open("wb") as file:
        write_weights(file, arrays)
    plain.write_bytes(model.SerializeToString())
    options = _options(1)
    options.optimized_model_filepath = str(work / _GRAPH)
    for name, value in (
        ("save_external_prepacked_constant_initializers", "1"),
        ("optimized_model_external_initializers_file_name", _WEIGHTS),
        ("optimized_model_external_initializers_min_size_in_bytes", "1024"),
    ):
        options.add_session_config_entry(f"session.{name}", value)
    try:
        ort.InferenceSession(str(plain), options, providers=_PROVIDERS)
    except _REFUSED as error:
        raise _unfit(source, error) from error
    plain.unlink()
    plain.with_suffix(".bin").unlink()
    content = {name: sha256_of(work / name) for name in (_GRAPH, _WEIGHTS)}
    (work / _CONTENT).write_text(json.dumps(content), encoding="utf-8")


def _part_of(entry: Path, part: Part) -> str | bytes:
    """Return the path of the graph of an entry's part, with the same file of weights.

    It is written once, since ``onnx`` takes time and memory, and its digest beside it. Where it can't be written, the
    graph itself is returned.
    """
    path = entry / f"part-{key_of(repr(part))}.onnx"
    digest = path.with_suffix(".sha256")
    with suppress(OSError):
        if digest.read_text(encoding="ascii") == sha256_of(path):
            return str(path)
    import onnx

    from gerund.packed.graph import keep_part

    model = onnx.load(str(entry / _GRAPH), load_external_data=False)
    keep_part(model, part)
    content: bytes = model.SerializeToString()
    try:
        with atomic_file(path, apart=True) as file:
            file.write(content)
        with atomic_file(digest, apart=True) as file:
            file.write(sha256_of(path).encode("ascii"))
    except (ResourceError, OSError):
        return content
    return str(path)


def _in_memory(
    builder: "GraphBuilder", options: ort.SessionOptions, source: Path, part: Part | None
) -> ort.InferenceSession:
    from gerund.packed.graph import keep_part

    model, arrays = builder.model("memory")
    names = [tensor.name for tensor in model.graph.initializer if tensor.external_data]
    if part is not None:
        keep_part(model, part)
    left = {tensor.name for tensor in model.graph.initializer}
    weights = {name: array for name, array in zip(names, arrays, strict=True) if name in left}
    options.add_external_initializers(list(weights), list(map(ort.OrtValue.ortvalue_from_numpy, weights.values())))
    try:
        return ort.InferenceSession(model.SerializeToString(), options, providers=_PROVIDERS)
    except _REFUSED as error:
        raise _unfit(source, error) from error


def _unfit(source: Path, error: BaseException) -> ModelError:
    return ModelError(f"cannot run {source} packed: its weights do not fit together ({error})")


def _intact(entry: Path) -> bool:
    """Whether an entry has the content that was written; read again only after the file system saw a change."""
    try:
        content = json.loads((entry / _CONTENT).read_text(encoding="utf-8"))
        stamps = {name: stamp_of(entry / name) for name in (_GRAPH, _WEIGHTS)}
        with suppress(OSError, ValueError):
            if json.loads((entry / _SEEN).read_text(encoding="utf-8")) == stamps:
                return True
        if any(sha256_of(entry / name) != content.get(name) for name in stamps):
            return False
    except (OSError, ValueError, AttributeError):
        return False
    with suppress(OSError, GerundError):
        write_atomic(entry / _SEEN, json.dumps(stamps))
    return True


@cache
def _code() -> str:
    """Return a digest of the code that builds graphs."""
    files = [Path(gguf_architectures.__file__), *sorted(Path(__file__).parent.glob("*.py"))]
    return key_of(*map(sha256_of, files))


@cache
def processor() -> str:
    """Describe the processor: the layout of weights depends on its instructions."""
    described = f"{platform.system()} {platform.machine()} {platform.processor()}"
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        described += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return described
