"""Refuse a model whose vectors have other dimensions than an index, before it is loaded; imports no torch.

Whether a model whose vectors have the same dimensions is the index's own is known once it is loaded.
"""

from collections.abc import Iterable
from pathlib import Path

from gerund.checks import read_json
from gerund.errors import FingerprintError, GerundError
from gerund.gguf_file import read_file
from gerund.models.bundled import BundledAdapters, bundled_folders, takes_bundled
from gerund.models.light_head import HEAD_FILE, HeadConfig
from gerund.models.saved_settings import read_saved
from gerund.models.sentence_transformers_folder import MODULES_FILE
from gerund.models.sources import SENTENCE_TRANSFORMERS, Source, find_spec
from gerund.retrieval.store import IndexMetadata
from gerund.settings.encoder import ANSWERS_FILE, EncoderConfig, read_settings
from gerund.settings.fields import AUTO_ADAPTER, NO_ADAPTER
from gerund.settings.model_spec import ModelSpec
from gerund.settings.templates import HIDDEN, NO_TRANSFORM


def refuse_other_dimensions(about: IndexMetadata, index: str, model: ModelSpec | str | Path) -> None:
    """Refuse a model that is yet to be loaded, where its files say that it can't search an index.

    Args:
        about: the index's metadata.
        index: its name in messages.
        model: as ``gerund.load`` takes it.

    Raises:
        FingerprintError: its vectors have other dimensions.
    """
    try:
        spec = ModelSpec.of(model)
        possible = _dimensions(spec)
    except GerundError:  # loading says what is wrong with its files
        return
    if possible and about.dimensions not in possible:
        raise FingerprintError(
            f"{index} was made with {about.model}, not with {spec.model}, whose vectors have "
            f"{' or '.join(map(str, sorted(possible)))} dimensions, not {about.dimensions}; open it with the index's "
            "model, or migrate it (gerund index --migrate)"
        )


def _dimensions(spec: ModelSpec) -> set[int]:
    """Return the dimensions that a model's vectors may have; none where only loading tells."""
    if spec.model.startswith(SENTENCE_TRANSFORMERS) or spec.adapter not in (None, NO_ADAPTER, AUTO_ADAPTER):
        return set()
    source = find_spec(spec)
    folder, width = source.folder, _width(source)
    if width is None or source.adapted is not None:
        return set()
    heads = set() if folder is None else _dimensions_of_heads([folder])
    if folder is not None and ((folder / ANSWERS_FILE).exists() or (not heads and (folder / MODULES_FILE).exists())):
        return set()
    saved, usual = None if folder is None else read_saved(folder), EncoderConfig()
    encoder = spec.without_auto().applied_to(usual if saved is None else saved.applied_to(usual))
    if encoder.transform != NO_TRANSFORM or encoder.states != HIDDEN:
        return set()
    bundles = map(BundledAdapters, bundled_folders()) if takes_bundled(spec) else ()
    fitting = [bundle.folder for bundle in bundles if bundle.base["numbers"]["hidden_size"] == width]
    # Some settings leave a head out.
    return {width * encoder.poolings} | heads | _dimensions_of_heads(fitting)


def _width(source: Source) -> int | None:
    """Return the width of a model's hidden states; None where its files don't say it."""
    if source.gguf is not None:
        width: int | None = read_file(source.gguf).value("embedding_length")
        return width
    config = {} if source.folder is None else read_json(source.folder / "config.json")
    config = config.get("text_config", config) if isinstance(config, dict) else {}
    return None if config.get("model_type") == "opt" else config.get("hidden_size")  # some OPTs project their states


def _dimensions_of_heads(folders: Iterable[Path]) -> set[int]:
    paths = [folder / HEAD_FILE for folder in folders]
    heads = [HeadConfig.from_dict(read_settings(path, "head")["head"]) for path in paths if path.is_file()]
    return {head.dimensions for head in heads if head.dimensions is not None}
