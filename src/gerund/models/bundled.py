"""Adapters bundled with gerund, for models that are downloaded separately.

Their folders are as gerund saves them, without the weights of the model. That model, the base, is recognized by its
numbers, its tokens and a sample of its weights, whatever they are stored as. Imports no torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from gerund.checks import read_json
from gerund.models.same_weights import WeightSample
from gerund.packed.safetensors_file import SafetensorsFile
from gerund.progress import say_once
from gerund.settings.fields import AUTO_ADAPTER
from gerund.settings.model_spec import ModelSpec

BASE, SAMPLE = "base.json", "base.safetensors"
"""What is in a folder of adapters to recognize their base by: numbers and tokens, and a sample of its weights."""

# What is compared of a config.
_NUMBERS = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True)
class BundledAdapters:
    """A folder of adapters that come with gerund."""

    folder: Path

    @cached_property
    def base(self) -> dict[str, Any]:
        """What ``base.json`` says."""
        data = read_json(self.folder / BASE)
        assert isinstance(data, dict)
        return data

    def fits_config(self, config: Any) -> bool:
        """Whether a config has the numbers of the base."""
        return bool(numbers_of(config) == self.base["numbers"])

    def fits_tokens(self, tokenizer: Any) -> bool:
        """Whether a tokenizer reads a text as that of the base does."""
        return bool(tokenizer([self.base["text"]], add_special_tokens=False)["input_ids"] == [self.base["ids"]])

    @property
    def sample(self) -> WeightSample:
        """A sample of the weights of the base."""
        stored, rows = SafetensorsFile(self.folder / SAMPLE), self.base["sample"]
        return WeightSample(rows, {name: stored[name] for name in rows})


def bundled_folders() -> list[Path]:
    """Return the folders of adapters that come with gerund."""
    assets = Path(str(resources.files("gerund") / "assets"))
    return sorted(path.parent for path in assets.glob(f"*/{BASE}"))


def bundled_for(spec: ModelSpec, config: Any, files: Callable[[], Sequence[Path]]) -> BundledAdapters | None:
    """Return the adapters that come with gerund for a model; None where there are none or the user wants none.

    ``files`` returns the model's weights, and is called for a config like that of a base alone.
    """
    if not takes_bundled(spec):
        return None
    fitting = (bundle for bundle in map(BundledAdapters, bundled_folders()) if bundle.fits_config(config))
    return next((bundle for bundle in fitting if bundle.sample.is_of(files())), None)


def takes_bundled(spec: ModelSpec) -> bool:
    """Whether a model's settings leave its adapters to gerund."""
    return spec.adapter == AUTO_ADAPTER or (spec.adapter is None and not spec.says_reading)


def tell_bundled(name: str) -> None:
    """Say that a model encodes with an adapter that was not asked for."""
    say_once(
        f"{name} encodes with the adapter that comes with gerund for it. Load it with adapter none to encode without, "
        "or with adapter auto to leave out this note"
    )


def numbers_of(config: Any) -> dict[str, Any]:
    """Return the numbers of an architecture that are compared."""
    return {"model_type": config.model_type, **{name: getattr(config, name, None) for name in _NUMBERS}}
