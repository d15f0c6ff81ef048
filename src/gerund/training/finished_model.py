"""The finished model of a run: written whole or not at all, with its tokenizer, adapter, head and report.

Knows: how weights and adapters are stored. Does not know: how the model was trained.
"""

import copy
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file, save_file

from gerund.jobs.files import write_whole
from gerund.jobs.folders import atomic_folder
from gerund.language_model import LanguageModel
from gerund.models import loading
from gerund.models.adapters import ADAPTER_FILES, Adapters
from gerund.models.heads import ProjectionHead
from gerund.seq2seq_model import Seq2SeqModel

if TYPE_CHECKING:
    from gerund.training.trainable_model import TrainableModel


def write_model(
    trained: "TrainableModel",
    folder: Path,
    report: dict[str, Any],
    *,
    head: ProjectionHead | None = None,
    extra_files: Sequence[Callable[[Path], None]] = (),
    overwrite: bool = False,
    is_copy: bool = False,
) -> Path:
    """Write the finished model with its tokenizer, ``gerund.json`` and ``training.json``, and ``extra_files``.

    Weights are written in the type of the base's checkpoint, bf16 for a model from scratch. Where an adapter was
    trained, the base is read once more from where it came, so that its weights are the untouched ones, and the
    adapter lies in a folder of its own: generating does not use it. What ``is_copy`` is nobody's but this call's.
    """
    # Loading the base samples random numbers, and a snapshot must not change the dropout of the steps after it.
    with torch.random.fork_rng(devices=[]), atomic_folder(folder, overwrite=overwrite) as partial:
        if trained.adapter is None:
            finished = trained.model if is_copy else copy.deepcopy(trained.model)
            finished = finished.to("cpu", _stored_type(trained))
            kind = Seq2SeqModel if trained.is_encoder_decoder else LanguageModel
            kind(finished, trained.tokenizer, trained.encoder, name=folder.name, head=head).save_into(partial)
        else:
            assert trained.source is not None
            base, tokenizer = loading.read(trained.source, None)
            with TemporaryDirectory(dir=partial.parent) as room:
                write_adapter(trained, Path(room))
                options: dict[str, Any] = {"name": folder.name, "adapters": Adapters.shared(Path(room)), "head": head}
                LanguageModel(base, tokenizer, trained.encoder, **options).save_into(partial)
        for write in extra_files:
            write(partial)
        write_whole(partial / "training.json", json.dumps(report, indent=1) + "\n")
    return folder


def write_adapter(trained: "TrainableModel", folder: Path) -> None:
    """Write the adapter as PEFT does, in the type of the base's checkpoint and without its place on this machine."""
    assert trained.adapter is not None
    assert trained.source is not None
    config = trained.adapter.peft_config["default"]
    config.base_model_name_or_path = Path(trained.source.name).name if trained.source.folder else trained.source.name
    training, config.inference_mode = config.inference_mode, True
    try:
        # "auto" would ask the hub whether the base's vocabulary has grown.
        trained.adapter.save_pretrained(str(folder), safe_serialization=True, save_embedding_layers=False)
    finally:
        config.inference_mode = training
    (folder / "README.md").unlink(missing_ok=True)  # an empty form
    weights, stored_type = folder / ADAPTER_FILES[1], _stored_type(trained)
    save_file({key: part.to(stored_type) for key, part in load_file(weights).items()}, weights, {"format": "pt"})


def _stored_type(trained: "TrainableModel") -> torch.dtype:
    stored = None if trained.source is None else loading.stored_dtype(trained.source)
    return stored or torch.bfloat16


def whole_head(head: ProjectionHead | None) -> ProjectionHead | None:
    """Return a copy of the head as it is now, on the CPU."""
    if head is None:
        return None
    own = ProjectionHead(head.settings)
    state = head.state_dict()
    own.load_state_dict({name: t.full_tensor() if hasattr(t, "full_tensor") else t for name, t in state.items()})
    return own.eval()
