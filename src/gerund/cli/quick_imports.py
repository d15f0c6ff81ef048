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
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

QUICK = frozenset(["ask", "chat", "embed", "generate", "index", "infill", "inspect", "rerank", "score", "search"])
"""The commands that neither train nor measure, and load a model for what may be a second's work."""

# Containers that are made before Python looks for cycles among the youngest: imports make a million, and few cycles.
_THRESHOLDS = (100_000, 50, 100)
_FIRST = "transformers.modeling_utils"
_COMPILER = "torch._dynamo"
# What attention masks need of the compiler's package, which does not need the rest.
_ALONE = f"{_COMPILER}._trace_wrapped_higher_order_op"
_ABSENT = ("is_scipy_available", "is_torch_distributed_available", "is_torch_flex_attn_available")


def prepare(arguments: Sequence[str]) -> None:
    """Make this process ready for a command.

    Args:
        arguments: of the process, the program's name first.
    """
    gc.set_threshold(*_THRESHOLDS)
    if len(arguments) > 1 and arguments[1] in QUICK and _FIRST not in sys.modules:
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
        if fullname == _FIRST:
            spec = PathFinder.find_spec(fullname, path, target)
            if spec is not None and spec.loader is not None and _is_fitting():
                spec.loader = _Leanly(spec.loader)
            return spec
        is_waiting = isinstance(sys.modules.get(_COMPILER), _WaitingCompiler)
        if is_waiting and fullname.startswith(f"{_COMPILER}.") and fullname != _ALONE:
            _real_compiler()
            return ModuleSpec(fullname, _Loaded()) if fullname in sys.modules else None
        return None


def _is_fitting() -> bool:
    """Whether nothing is there yet that this would come too late for, and no GPU to compile for."""
    import torch

    return _COMPILER not in sys.modules and not torch.cuda.is_available()


class _Leanly(Loader):
    """Loads a module while parts that it does not need are said not to be there."""

    def __init__(self, own: Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        import torch

        waiting = _WaitingCompiler(_COMPILER)
        waiting.__path__ = [str(Path(torch.__file__).parent / "_dynamo")]
        sys.modules[_COMPILER] = waiting
        torch._dynamo = waiting
        if not hasattr(torch.distributed, "tensor"):
            # PEFT asks of each weight whether it is spread over machines. Who imports the module replaces this.
            torch.distributed.tensor = _NoSpreadTensors("torch.distributed.tensor")
        with _absent():
            self._own.exec_module(module)
            # Masks are imported in any case, and ask the same.
            import_module("transformers.masking_utils")


@contextmanager
def _absent() -> Iterator[None]:
    """Let transformers find that some packages are not installed, until the block ends."""
    places = [import_module(f"transformers.utils{name}") for name in ("", ".import_utils")]
    before = [(place, name, getattr(place, name)) for place in places for name in _ABSENT if hasattr(place, name)]
    for place, name, _ in before:
        setattr(place, name, lambda *_arguments, **_options: False)
    try:
        yield
    finally:
        for place, name, own in before:
            setattr(place, name, own)


class _Loaded(Loader):
    """Gives a module that is there already."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        del module


class _WaitingCompiler(ModuleType):
    """Stands for torch's compiler until it is needed.

    What it is told about functions, that they are not to be traced into, means nothing to who compiles nothing.
    """

    @staticmethod
    def disable(fn: Any = None, *_arguments: Any, **_options: Any) -> Any:
        """Return a function as it is; without one what does."""
        return (lambda own: own) if fn is None else fn

    allow_in_graph = assume_constant_result = disable

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_real_compiler(), name)


class _NoSpreadTensors(ModuleType):
    """Stands for tensors that are spread over machines, of which a process alone has none."""

    class DTensor:
        """The type of none of its tensors."""


def _real_compiler() -> ModuleType:
    import torch

    if isinstance(sys.modules.get(_COMPILER), _WaitingCompiler):
        del sys.modules[_COMPILER]
        vars(torch).pop("_dynamo", None)
    return import_module(_COMPILER)
