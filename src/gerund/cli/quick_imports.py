"""Faster start of short commands: defer imports of torch and transformers that they never call.

With its first model, transformers imports what other models, several machines and compilers need: torch's compiler
with sympy, distributed tensors, scipy. pyarrow imports pandas to recognize its arrays. That is half of the start of
``gerund search``. In the process of a command these wait until something asks for them, and transformers' list of its
own models, for which it reads thousands of files, is kept in the user's cache.

It is for the process of a command alone, never for a library that somebody imports, and only where there is no GPU:
there a compiler may be asked for soon. Commands that train or measure import everything.

Knows: how transformers asks what is installed, names of torch's modules. Does not know: what commands do.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

QUICK = frozenset(
    ["ask", "chat", "embed", "generate", "index", "infill", "inspect", "mcp", "rerank", "score", "search"]
)
"""The commands that neither train nor measure, and load a model for what may be a second's work."""

# How many containers are made before Python looks for cycles: imports make a million, and few cycles.
_THRESHOLDS = (100_000, 50, 100)
_LAZY_IMPORTS = "transformers.utils.import_utils"
_MODELS = "transformers.modeling_utils"
_COMPILER = "torch._dynamo"
# What attention masks need of the compiler's package, which does not need the rest.
_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"
# pyarrow imports it to recognize its arrays, which no command makes.
_ARRAYS = "pandas"
# It imports most of what waits.
_EVERYTHING = "sentence_transformers"
_ABSENT = ("is_scipy_available", "is_torch_distributed_available", "is_torch_flex_attn_available")


def prepare(arguments: Sequence[str]) -> None:
    """Make this process ready for a command; ``arguments`` are the process's, the program's name first."""
    gc.set_threshold(*_THRESHOLDS)
    if len(arguments) > 1 and arguments[1] in QUICK and _LAZY_IMPORTS not in sys.modules:
        sys.meta_path.insert(0, _Finder())


def leave() -> None:
    """Spare the end of this process a search for cycles, which nothing would come after."""
    gc.freeze()


class _Finder(MetaPathFinder):
    """Waits for the first import of a model's code, and for what needs the real compiler."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return how a module is loaded where that is to be another way; None for all others."""
        if fullname == _EVERYTHING:
            sys.meta_path.remove(self)
            if isinstance(sys.modules.get(_COMPILER), _WaitingCompiler):
                _real_compiler()
            return None
        if fullname == _ARRAYS and _asked_by() in ("gerund", "pyarrow"):
            return ModuleSpec(fullname, _NotInstalled())
        execute = {_LAZY_IMPORTS: _cache_model_list, _MODELS: _import_less}.get(fullname)
        if execute is not None:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None and _without_compiler():
                spec.loader = _Loader(spec.loader, execute)
            return spec
        is_waiting = isinstance(sys.modules.get(_COMPILER), _WaitingCompiler)
        if is_waiting and fullname.startswith(f"{_COMPILER}.") and fullname != _ALONE:
            _real_compiler()
            return ModuleSpec(fullname, _Loaded()) if fullname in sys.modules else None
        return None


def _asked_by() -> str:
    """Return the package whose code imports something now; what is compiled, as in pyarrow, counts as its caller's."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_globals.get("__name__", ""):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _without_compiler() -> bool:
    """Whether the compiler is not imported yet, and there is no GPU to compile for."""
    import torch

    return _COMPILER not in sys.modules and not torch.cuda.is_available()


class _Loader(Loader):
    """Loads a module as its own loader does, by way of a function that may do something before and after."""

    def __init__(self, loader: Loader, execute: Callable[[Loader, ModuleType], None]) -> None:
        self._loader, self._execute = loader, execute

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._execute(self._loader, module)


class _Loaded(Loader):
    """Gives a module that is there already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        del module


class _NotInstalled(Loader):
    """Ends an import as that of a package that is not installed."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        raise ModuleNotFoundError(f"{spec.name} is left out of short commands", name=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


def _import_less(loader: Loader, module: ModuleType) -> None:
    """Import transformers' model code while parts that it does not need wait, or are said not to be installed."""
    import torch

    compiler = _WaitingCompiler(_COMPILER)
    compiler.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
    sys.modules[_COMPILER] = torch._dynamo = compiler
    _spare_sympy()
    if not hasattr(torch.distributed, "tensor"):
        # PEFT asks of each weight whether it is distributed. Importing the module replaces this.
        torch.distributed.tensor = _NoDistributedTensors("torch.distributed.tensor")
    with _absent():
        loader.exec_module(module)
        # Masks are imported in any case, and ask the same.
        import_module("transformers.masking_utils")


@contextmanager
def _absent() -> Iterator[None]:
    """Let transformers find that some packages are not installed, until the block ends."""
    modules = [import_module(f"transformers.utils{name}") for name in ("", ".import_utils")]
    before = [(module, name, getattr(module, name)) for module in modules for name in _ABSENT if hasattr(module, name)]
    for module, name, _ in before:
        setattr(module, name, lambda *_arguments, **_options: False)
    try:
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)


def _cache_model_list(loader: Loader, module: Any) -> None:
    """Import transformers' lazy imports, and keep on the disk what they read in thousands of files of models."""
    loader.exec_module(module)
    read = module.create_import_structure_from_path
    models = Path(module.__file__).parents[1] / "models"

    @cache
    def create_import_structure_from_path(path: str) -> Any:
        if Path(path) not in (models, models / "__init__.py"):  # a file stands for its folder
            return read(path)
        from gerund.jobs.disk_cache import user_cache

        file = user_cache("imports") / "transformers-models.json"
        version = [str(models), sys.modules["transformers"].__version__, models.stat().st_mtime_ns]
        with suppress(OSError, ValueError, TypeError, KeyError):
            stored = json.loads(file.read_bytes())
            if stored["version"] == version:
                return _structure(stored["structure"])
        structure = read(path)
        with suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            unfinished = file.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps({"version": version, "structure": _lists(structure)}))
            unfinished.replace(file)
        return structure

    module.create_import_structure_from_path = create_import_structure_from_path


def _lists(structure: Any) -> Any:
    """Return transformers' dictionaries by name or set of packages, with sets of names in them, as JSON has it."""
    if not isinstance(structure, dict):
        return {"names": sorted(structure)}
    return [[sorted(key) if isinstance(key, frozenset) else key, _lists(inner)] for key, inner in structure.items()]


def _structure(lists: Any) -> Any:
    """Return what ``_lists`` was made from."""
    if isinstance(lists, dict):
        return set(lists["names"])
    return {frozenset(key) if isinstance(key, list) else key: _structure(inner) for key, inner in lists}


class _WaitingCompiler(ModuleType):
    """Stands for torch's compiler. Its marks on functions that it shall not trace mean nothing until it is there."""

    @staticmethod
    def disable(fn: Any = None, *_arguments: Any, **_options: Any) -> Any:
        """Return a function unchanged; without a function, a decorator that does."""
        return (lambda function: function) if fn is None else fn

    allow_in_graph = assume_constant_result = disable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real_compiler(), name)


def _spare_sympy() -> None:
    """Build models on the device ``meta``, without memory, by what needs no sympy.

    Torch computes ranges and random numbers there in Python, with the compiler's types. Ranges become real ones, of a
    few numbers each, and random numbers are left out.
    """
    import torch
    from torch.nn import init
    from torch.utils import _device

    arange, normal = torch.arange, init._no_grad_normal_
    _device._device_constructors()  # lists, once, the functions that a device as context is for

    def real_range(*arguments: Any, **options: Any) -> Any:
        if options.get("device") is None and torch.get_default_device().type == "meta":
            options["device"] = "cpu"
        return arange(*arguments, **options)

    def normal_or_none(tensor: Any, *arguments: Any, **options: Any) -> Any:
        return tensor if tensor.is_meta else normal(tensor, *arguments, **options)

    torch.arange, init._no_grad_normal_ = real_range, normal_or_none


class _NoDistributedTensors(ModuleType):
    """Stands for tensors that are distributed over machines; a process alone has none."""

    class DTensor:
        """The type of none of its tensors."""


def _real_compiler() -> ModuleType:
    import torch

    if isinstance(sys.modules.get(_COMPILER), _WaitingCompiler):
        del sys.modules[_COMPILER]
        vars(torch).pop("_dynamo", None)
    return import_module(_COMPILER)
