"""The files of a model's folder: weights with the adapter merged in, ``gerund.json``, and who may read it.

Knows: which file holds what. Does not know: which format asked for it.
"""

from pathlib import Path

from gerund.exporting.files import change_json
from gerund.exporting.modules_json import write_own_modules
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.models import loading
from gerund.models.adapters import Adapters, merged_state, merging_unties
from gerund.models.fingerprint import fingerprint, weights_hash
from gerund.models.settings_file import settings_text
from gerund.settings.encoder import CONFIG_FILE, EncoderConfig
from gerund.settings.model_spec import EncoderSpec


def write_merged(runtime: EncoderRuntime, folder: Path) -> str:
    """Write a plain model whose weights are what the runtime's adapter makes of them, with ``gerund.json``.

    Returns:
        The encoder's fingerprint, which the merged weights have a part in.
    """
    state = merged_state(runtime.model, runtime.adapter)
    hashed = weights_hash(state)
    loading.save_model(runtime.model, runtime.tokenizer, state, folder)
    if merging_unties(runtime.model, runtime.adapter):
        change_json(folder / "config.json", tie_word_embeddings=False)
    head = runtime.head
    identity = fingerprint(hashed, "" if head is None else head.fingerprint, runtime.config, runtime.n_layers)
    write_settings(folder, runtime.config, runtime.n_layers, identity)
    if head is not None:
        head.save(folder)
    return identity


def write_settings(
    folder: Path, encoder: EncoderConfig, n_layers: int, identity: str, *, adapters: Adapters | None = None
) -> None:
    """Write ``gerund.json``, with k worked out, and copy adapters into folders of their own.

    sentence-transformers is told that only gerund's own class reads the folder as it is meant.

    Args:
        folder: a model's folder.
        encoder: how the model is read.
        n_layers: how many layers it has.
        identity: the encoder's fingerprint.
        adapters: those of its jobs.
    """
    places = (adapters or Adapters()).copy_into(folder)
    text = settings_text(EncoderSpec.of_config(encoder, n_layers), identity, places)
    (folder / CONFIG_FILE).write_text(text, encoding="utf-8")
    write_own_modules(folder, encoder)
