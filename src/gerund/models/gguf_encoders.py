"""The encoder settings of embedding models in GGUF files."""

from gerund.errors import ModelError
from gerund.gguf_file import GgufFile
from gerund.settings.model_spec import EncoderSpec

POOLING_TYPES = {1: "mean", 2: "first", 3: "last"}
"""Poolings by llama.cpp's numbers."""
_NO_POOLING, _RANK = 0, 4


def encoder_settings(file: GgufFile) -> EncoderSpec | None:
    """Return the encoder settings of an embedding model; None for other files."""
    pooling = file.value("pooling_type")
    causal = file.value("attention.causal", True)
    if pooling in (None, _NO_POOLING):
        return None if causal else EncoderSpec(attention="bidir", pooling="mean", append_eos=False)
    if type(pooling) is not int or pooling not in POOLING_TYPES:
        what = f"it pools in a way that is not known ({pooling!r})"
        if pooling == _RANK:
            what = "it is a reranker, which is not read from GGUF; give the folder of the model in safetensors"
        raise ModelError(f"cannot load {file.path}: {what}")
    # The tokenizer adds an end token where the file asks for one.
    return EncoderSpec(attention="causal" if causal else "bidir", pooling=POOLING_TYPES[pooling], append_eos=False)
