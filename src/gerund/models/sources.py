"""Where a model comes from: a folder, the hub or this installation.

Knows: names, folders, whether the hub answers. Does not know: torch, so that a slip in a name is said at once.
"""

import threading
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib import resources
from pathlib import Path

from gerund.checks import place
from gerund.config import DEFAULT_MODEL
from gerund.errors import ConfigError, ModelError
from gerund.models.folder_files import demand_readable_files
from gerund.spec import ModelSpec

DEFAULT_NAME = "the bundled model"

_NO_GGUF = "does not read; give the folder of the model with safetensors weights from which it was made"
# How near to the name of the bundled model a slip in it is.
_SLIP = 0.75
# How long the hub has to say anything, and how long a name's look-up may take on top.
_SECONDS = 2.0
_LOOK_UP = 1.0


@dataclass(frozen=True)
class Source:
    """Where a model comes from: ``folder`` for a local one, else the hub id ``name``."""

    name: str
    folder: Path | None

    @property
    def where(self) -> str:
        """What loaders take: the folder or the hub id."""
        return str(self.folder or self.name)

    @cached_property
    def local_only(self) -> bool:
        """Whether only files on this machine are read: those of a folder, or the cache while the hub is silent."""
        return self.folder is not None or not hub_answers()

    def demand_reachable(self) -> None:
        """Refuse a hub id whose config is neither in the cache nor to be had.

        Raises:
            ModelError: it is not.
        """
        if not self.local_only or self.folder is not None:
            return
        from huggingface_hub import constants, try_to_load_from_cache

        if not isinstance(try_to_load_from_cache(self.name, "config.json"), str):
            offline = " (HF_HUB_OFFLINE is set)" if constants.is_offline_mode() else ""
            raise ModelError(
                f"cannot read the config of {self.name}, taken as a hub id since there is no such folder: it is not in "
                f"the local cache, and the hub cannot be reached{offline}"
            )


def find(model: str | Path | None) -> Source:
    """Tell a folder from a hub id; None and ``default`` are the bundled model.

    Raises:
        ConfigError: it is neither a text nor a path.
        ModelError: a path that is no folder, a folder without a model, or all but the name of the bundled model.
    """
    if model is not None and not isinstance(model, str | Path):
        raise ConfigError(f"a model is given by its name or its folder, not as {model!r}")
    # As a path it may be ./default, which Path writes the same way.
    if model is None or (str(model) == DEFAULT_MODEL and not (isinstance(model, Path) and model.is_dir())):
        folder = Path(str(resources.files("gerund") / "assets" / "default"))
        if not (folder / "config.json").is_file():
            raise ModelError("this installation has no bundled model; name a model")
        return Source(DEFAULT_NAME, folder)
    text = str(model)
    path = place("model", model).expanduser() if text else Path()
    if text and path.is_dir():
        return Source(text, _check_folder(path))
    if text and path.exists():
        raise ModelError(_of_file(path))
    if isinstance(model, Path) or looks_local(text):
        raise ModelError(f"there is no folder {text!r}; give a model's folder, a hub id, or {DEFAULT_MODEL}")
    # No hub model is called so, and without a network it takes long until that is clear.
    if "/" not in text and get_close_matches(text.lower(), [DEFAULT_MODEL], cutoff=_SLIP):
        raise ModelError(f"there is no folder {text!r}; did you mean {DEFAULT_MODEL}?")
    return Source(text, None)


def looks_local(name: str) -> bool:
    """Return whether a name can only be meant as a place on this machine, so that no hub is asked for it."""
    if name.startswith((".", "/", "~")) or not name:
        return True
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return True
    return False


def hub_answers() -> bool:
    """Whether the hub says anything, whatever it is, within a few seconds.

    The hub's own calls try again for half a minute; a cached model need not wait for that, nor who has no network.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.is_offline_mode():
        return False
    heard = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_SECONDS)
        except Exception:  # whatever is wrong, the hub has not answered
            return
        heard.set()

    # Looking a name up knows no timeout, so it is waited for from outside.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_SECONDS + _LOOK_UP)
    return heard.is_set()


def _of_file(path: Path) -> str:
    """Return what to say of a file that is given for the folder of a model."""
    if is_gguf(path):
        return f"{path} is a GGUF file, which gerund {_NO_GGUF}"
    return f"{path} is a file; give the folder of a model"


def is_gguf(path: Path) -> bool:
    """Whether a file is one of llama.cpp's, by its name or its first bytes."""
    if path.suffix.lower() == ".gguf":
        return True
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def _check_folder(path: Path) -> Path:
    """Return the folder of a model, refusing those that only look like one."""
    demand_readable_files(path)
    is_adapter = (path / "adapter_config.json").is_file()
    if not (path / "config.json").is_file():
        what = "an adapter; give its base model, and this folder as the adapter" if is_adapter else "no model"
        if not is_adapter and (gguf := next(iter(sorted(path.glob("*.gguf"))), None)):
            raise ModelError(f"{path} holds no model but {gguf.name}, a GGUF file, which gerund {_NO_GGUF}")
        hint = f"; did you mean {path / 'model'}?" if (path / "model" / "config.json").is_file() else ""
        raise ModelError(f"{path} holds {what}: it has no config.json{hint}")
    if is_adapter:
        # transformers would switch it on for good, also while generating.
        raise ModelError(f"{path} holds a model and an adapter; move the adapter into a folder of its own")
    return path


def found_from_anywhere(spec: ModelSpec) -> ModelSpec:
    """Return a spec whose local folders and files have whole paths, for whoever stands in another folder."""
    places = ("model", "adapter", "infill_adapter", "scorer", "sample")
    said = {name: value for name in places if isinstance(value := getattr(spec, name), str)}
    whole = {
        name: str(Path(value).absolute())
        for name, value in said.items()
        if value not in (DEFAULT_MODEL, "none") and Path(value).exists()
    }
    return spec.model_copy(update=whole)
