"""Write an encoder or a converted checkpoint in one of the export formats."""

import shlex
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gerund.checks import one_of, place
from gerund.errors import ConfigError
from gerund.exporting import gguf, merged, onnx, openvino, sentence_transformers
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.jobs.files import atomic_folder
from gerund.models import loading
from gerund.models.adapters import Adapters, base_state
from gerund.models.encoder_settings import write_settings
from gerund.models.sources import Source
from gerund.settings.encoder import EXPORT_FORMATS
from gerund.settings.plan import Direction

GENERATING = ("gguf", "gguf-q8_0")


class Kept(Protocol):
    """What a model's folder holds beside the model: a scorer."""

    def save(self, folder: Path) -> None:
        """Write its own files."""


@dataclass(frozen=True)
class Export:
    """What was written.

    Attributes:
        folder: where it lies.
        load: the line of Python that loads it; for GGUF the command.
        why_custom: for ``sentence-transformers``, why the folder needs gerund's own class; empty where plain
            sentence-transformers reads it.
        fingerprint: for ``merged``, the fingerprint of the encoder that was written.
    """

    folder: Path
    load: str
    why_custom: str = ""
    fingerprint: str = ""


def export(
    runtime: EncoderRuntime, folder: str | Path, format: str, *, scorer: Kept | None = None, overwrite: bool = False
) -> Export:
    """Write an encoder for other tools; see ``LanguageModel.export``."""
    one_of("format", format, EXPORT_FORMATS)
    if format not in GENERATING:
        # Those are for generating, which is the same whatever the encoder reads by.
        _refuse_hybrid(runtime)
        runtime.config.refuse_methods(f"an export as {format}")
    folder = place("the folder to write", folder)
    with atomic_folder(folder, overwrite=overwrite) as work:
        if format == "merged":
            identity = merged.write(runtime, work)
            if scorer is not None:
                scorer.save(work)
            return Export(folder, f"gerund.load({str(folder)!r})", fingerprint=identity)
        if format in ("onnx", "onnx-int8"):
            onnx.write(runtime, work, eight_bits=format == "onnx-int8")
            return Export(folder, f"onnxruntime.InferenceSession({str(folder / onnx.MODEL_FILE)!r})")
        if format in GENERATING:
            gguf.write(runtime, work, eight_bits=format == "gguf-q8_0")
            return Export(folder, f"llama-cli -m {shlex.quote(str(folder / gguf.MODEL_FILE))}")
        if format == "openvino":
            openvino.write(runtime, work)
            return Export(folder, f"openvino.Core().compile_model({str(folder / openvino.MODEL_FILE)!r}, 'CPU')")
        why_custom = sentence_transformers.write(runtime, work)
    name = "sentence_transformers.SentenceTransformer"
    if why_custom:
        name = "gerund.integrations.sentence_transformers.load"
    return Export(folder, f"{name}({str(folder)!r})", why_custom)


def convert(
    source: Source,
    runtime: EncoderRuntime,
    folder: str | Path,
    identity: str,
    *,
    adapters: Adapters | None = None,
    scorer: Kept | None = None,
    more: Mapping[str, Path] | None = None,
    without: Collection[str] = (),
    overwrite: bool = False,
) -> None:
    """Copy a checkpoint, byte for byte, and put ``gerund.json`` beside it."""
    _refuse_hybrid(runtime)
    with atomic_folder(folder, overwrite=overwrite) as work:
        if source.gguf is not None:
            loading.save_model(runtime.model, runtime.tokenizer, base_state(runtime.model), work)
        else:
            for path in loading.original_files(source):
                if path.name not in without:
                    shutil.copyfile(path, work / path.name)
        for name, path in (more or {}).items():
            shutil.copyfile(path, work / name)
        write_settings(work, runtime.config, runtime.n_layers, identity, adapters=adapters)
        if runtime.head is not None:
            runtime.head.save(work)
        if runtime.transform is not None:
            runtime.transform.save(work)
        if scorer is not None:
            scorer.save(work)


def _refuse_hybrid(runtime: EncoderRuntime) -> None:
    if any(view.direction is Direction.HYBRID for view in runtime.plan.views):
        raise ConfigError("the plan 'hybrid' fills spans and does not encode; take another plan, such as bidir")
