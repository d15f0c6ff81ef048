"""Refuse a model that can't search an index before it is loaded, by what its files say; imports no torch.

What the files don't tell, such as whether two models of the same sizes have the same weights, is left to the
fingerprint, which is known once the model is loaded.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gerund.checks import read_json
from gerund.errors import FingerprintError, GerundError
from gerund.gguf_file import read_file
from gerund.models.bundled import BundledAdapters, bundled_folders
from gerund.models.head_settings import HEAD_FILE
from gerund.models.saved_settings import read_saved
from gerund.models.sources import SENTENCE_TRANSFORMERS, Source, find_spec
from gerund.retrieval.store import IndexMetadata
from gerund.settings.answers import ANSWERS_FILE
from gerund.settings.encoder import EncoderConfig
from gerund.settings.fields import AUTO_ADAPTER, NO_ADAPTER
from gerund.settings.model_spec import ModelSpec
from gerund.settings.templates import HIDDEN, NO_TRANSFORM

_CONFIG, _MODULES = "config.json", "modules.json"


@dataclass(frozen=True)
class _Sizes:
    """The width of a model's hidden states and its number of layers; None for what its files don't say."""

    width: int | None
    layers: int | None
    is_gguf: bool

    @classmethod
    def of(cls, source: Source) -> "_Sizes":
        if source.gguf is not None:
            file = read_file(source.gguf)
            return cls(file.value("embedding_length"), file.value("block_count"), is_gguf=True)
        config = {} if source.folder is None else read_json(source.folder / _CONFIG)
        config = config.get("text_config", config)
        if config.get("model_type") == "opt":  # some project their states
            config = {}
        return cls(config.get("hidden_size"), config.get("num_hidden_layers"), is_gguf=False)

    def differ(self, other: "_Sizes") -> bool:
        """Whether the weights of two models can't be the same; programs count the layers of a GGUF file differently."""
        if None in (self.width, other.width):
            return False
        counted = self.is_gguf == other.is_gguf and None not in (self.layers, other.layers)
        return self.width != other.width or (counted and self.layers != other.layers)

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.width}"


def refuse_other_model(about: IndexMetadata, index: str, given: Any) -> None:
    """Refuse a model that is yet to be loaded, where its files say that it can't search an index.

    Args:
        about: the index's metadata.
        index: its name in messages.
        given: the model, as ``gerund.load`` takes it.

    Raises:
        FingerprintError: its vectors have other dimensions, or its weights are others and it shares no space.
    """
    try:
        spec = ModelSpec.of(given)
        why = _difference(about, index, spec)
    except (GerundError, AttributeError):  # loading says what is wrong with its files
        return
    if why is not None:
        raise FingerprintError(
            f"{index} was made with {about.model}, not with {spec.model}, {why}; open it with the "
            "index's model, or migrate it (gerund index --migrate)"
        )


def _difference(about: IndexMetadata, index: str, spec: ModelSpec) -> str | None:
    """Return how a model is known to differ from that of an index; None where only loading tells."""
    if spec.model.startswith(SENTENCE_TRANSFORMERS) or spec.adapter not in (None, NO_ADAPTER, AUTO_ADAPTER):
        return None
    source = find_spec(spec)
    sizes = _Sizes.of(source)
    if sizes.width is None or source.adapted is not None:
        return None
    bundles = _possible_bundles(spec, sizes)
    dimensions = None if bundles else _dimensions(source, spec, sizes.width)
    if dimensions not in (None, about.dimensions):
        return f"whose vectors have {dimensions} dimensions, not {about.dimensions}"
    heads = [bundle.folder for bundle in bundles] or ([] if source.folder is None else [source.folder])
    spaces = {space for head in heads if (space := _space(head)) is not None}
    # A model without a declared space may be the teacher whose space the index declares.
    if spaces & {about.fingerprint, about.space} or (about.space and (bundles or not spaces or spec.says_reading)):
        return None
    own = _sizes_of_own(about, index)
    return f"which has {sizes}, not {own}" if own is not None and sizes.differ(own) else None


def _sizes_of_own(about: IndexMetadata, index: str) -> _Sizes | None:
    try:
        return _Sizes.of(find_spec(about.model_spec(index)))
    except GerundError:  # it was made in memory, or its files are elsewhere now
        return None


def _possible_bundles(spec: ModelSpec, sizes: _Sizes) -> list[BundledAdapters]:
    """Return the adapters that come with gerund for a model of these sizes, which it may load with."""
    if spec.adapter == NO_ADAPTER or (spec.adapter is None and spec.says_reading):
        return []
    numbers = (sizes.width, sizes.layers)
    return [
        bundle
        for bundle in map(BundledAdapters, bundled_folders())
        if numbers == tuple(bundle.base["numbers"][name] for name in ("hidden_size", "num_hidden_layers"))
    ]


def _dimensions(source: Source, spec: ModelSpec, width: int) -> int | None:
    """Return the dimensions of a model's vectors; None where a head or a transform decides."""
    folder, usual = source.folder, EncoderConfig()
    if folder is not None and any((folder / name).exists() for name in (_MODULES, HEAD_FILE, ANSWERS_FILE)):
        return None
    saved = None if folder is None else read_saved(folder)
    encoder = spec.without_auto().applied_to(usual if saved is None else saved.applied_to(usual))
    is_plain = encoder.transform == NO_TRANSFORM and encoder.states == HIDDEN
    return width * encoder.poolings if is_plain else None


def _space(folder: Path) -> str | None:
    """Return the space that the head in a folder declares; None without one."""
    path = folder / HEAD_FILE
    space = read_json(path).get("space") if path.is_file() else None
    return space if isinstance(space, str) else None
