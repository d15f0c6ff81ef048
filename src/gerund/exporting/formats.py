"""What ``LanguageModel.export``, ``LanguageModel.save`` and ``gerund convert`` write.

Knows: what each format consists of. Does not know: the verbs, the command line.
"""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gerund.attention.plan import Direction
from gerund.config import CONFIG_FILE, EncoderConfig, encoder_config_json
from gerund.errors import ConfigError, unknown_name
from gerund.inference.encoding import Reader
from gerund.models import loading
from gerund.models.adapters import ADAPTER_FILES, merged_state, merging_unties
from gerund.models.fingerprint import fingerprint, weights_hash
from gerund.models.saving import atomic_folder

FORMATS = ("sentence-transformers", "merged")
_ADAPTER = "adapter"


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        folder: where it lies.
        load: the line of Python that loads it.
        why_custom: for ``sentence-transformers``, why the folder needs gerund's own class; empty where plain
            sentence-transformers reads it.
    """

    folder: Path
    load: str
    why_custom: str = ""


def export(reader: Reader, folder: str | Path, format: str, *, overwrite: bool = False) -> Export:
    """Write an encoder for other tools; see ``LanguageModel.export``.

    Args:
        reader: the model and how it is read.
        folder: where to.
        format: one of ``FORMATS``.
        overwrite: replace what is there.

    Raises:
        ConfigError: an unknown format, or a plan that does not encode.
        ModelError: an adapter that cannot be merged into the weights.
        OutputExistsError: there is something already.
        ResourceError: the disk is full; nothing is left behind.
    """
    if format not in FORMATS:
        raise unknown_name("format", format, FORMATS)
    _refuse_hybrid(reader)
    folder = Path(folder)
    with atomic_folder(folder, overwrite=overwrite) as work:
        if format == "merged":
            write_merged(reader, work)
            return Export(folder, f"gerund.load({str(folder)!r})")
        from gerund.exporting.sentence_transformers import write

        why_custom = write(reader, work)
    name = "sentence_transformers.SentenceTransformer"
    if why_custom:
        name = "gerund.integrations.sentence_transformers.load"
    return Export(folder, f"{name}({str(folder)!r})", why_custom)


def write_merged(reader: Reader, folder: Path) -> None:
    """Write a plain model whose weights are what the adapter makes of them, with ``gerund.json`` beside them."""
    state = merged_state(reader.model)
    hashed = weights_hash(state)
    loading.save_model(reader.model, reader.tokenizer, state, folder)
    if merging_unties(reader.model):
        change_json(folder / "config.json", tie_word_embeddings=False)
    encoder = replace(reader.config, adapter=None)
    write_settings(folder, encoder, reader.n_layers, fingerprint(hashed, "", encoder, reader.n_layers))


def convert(
    source: loading.Source,
    reader: Reader,
    folder: str | Path,
    identity: str,
    *,
    adapter: Path | None = None,
    overwrite: bool = False,
) -> None:
    """Copy a checkpoint, byte for byte, and put ``gerund.json`` beside it.

    Args:
        source: the checkpoint.
        reader: the same model, loaded and proven to obey the plan.
        folder: where to.
        identity: the encoder's fingerprint.
        adapter: a PEFT folder to be copied along.
        overwrite: replace what is there.

    Raises:
        ConfigError: a plan that does not encode.
        OutputExistsError: there is something already.
        ResourceError: the disk is full; nothing is left behind.
    """
    _refuse_hybrid(reader)
    with atomic_folder(folder, overwrite=overwrite) as work:
        for path in loading.original_files(source):
            shutil.copyfile(path, work / path.name)
        write_settings(work, reader.config, reader.n_layers, identity, adapter=adapter)


def write_settings(
    folder: Path, encoder: EncoderConfig, n_layers: int, identity: str, *, adapter: Path | None = None
) -> None:
    """Write ``gerund.json``, with k worked out, and copy the adapter into a folder of its own.

    Args:
        folder: a model's folder.
        encoder: how the model is read.
        n_layers: how many layers it has.
        identity: the encoder's fingerprint.
        adapter: a PEFT folder.
    """
    encoder = replace(encoder, attention=encoder.attention.with_defaults(n_layers), adapter=None)
    if adapter is not None:
        encoder = replace(encoder, adapter=_ADAPTER)
        (folder / _ADAPTER).mkdir()
        for name in ADAPTER_FILES:
            shutil.copyfile(adapter / name, folder / _ADAPTER / name)
    (folder / CONFIG_FILE).write_text(encoder_config_json(encoder, identity), encoding="utf-8")


def _refuse_hybrid(reader: Reader) -> None:
    if any(view.direction is Direction.HYBRID for view in reader.plan.views):
        raise ConfigError("the plan 'hybrid' fills spans and does not encode; take another plan, such as bidir")


def change_json(path: Path, **values: Any) -> None:
    """Set some fields of a JSON file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**data, **values})


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file as transformers writes its own."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
