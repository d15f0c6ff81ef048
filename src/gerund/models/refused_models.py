"""Ready-made encoders and rerankers that gerund refuses by name, with what to do instead.

Knows: architectures whose model is their author's code, and encoders that do not generate. Does not know: files.
"""

from typing import Any

from gerund.errors import ModelError

_MERGED = "use sentence-transformers with trust_remote_code"
_BIDIRECTIONAL_CODE = f"a decoder whose attention is its author's code, which gerund never runs; {_MERGED}"
_BY_NAME = {
    "NVEmbedModel": f"which pools by attention of its own in its author's code; {_MERGED}",
    "nvembed": f"which pools by attention of its own in its author's code; {_MERGED}",
    "JinaEmbeddingsV5Model": (
        "which switches adapters in its author's code; take one of its merged repositories, whose names end in "
        "-retrieval, -text-matching, -clustering or -classification"
    ),
    "JinaForRanking": f"a listwise reranker in its author's code; {_MERGED}",
    "embedding_gemma2": "an encoder that does not generate; use sentence-transformers",
    "eurobert": "an encoder that does not generate; use sentence-transformers",
    "LlamaBidirectionalModel": _BIDIRECTIONAL_CODE,
    "llama_bidirec": _BIDIRECTIONAL_CODE,
    "Qwen3BidirectionalModel": _BIDIRECTIONAL_CODE,
    "DeepseekV3BidirectionalModel": _BIDIRECTIONAL_CODE,
    "Lfm2BidirectionalModel": _BIDIRECTIONAL_CODE,
    "bidirectional_pplx_qwen3": _BIDIRECTIONAL_CODE,
    "C2LLMForEmbedding": _BIDIRECTIONAL_CODE,
}


def refuse_by_name(stored: Any, name: str) -> None:
    """Refuse an architecture whose model is its author's code, or an encoder that does not generate, by its name.

    Args:
        stored: the config as it is on the disk.
        name: of the model.

    Raises:
        ModelError: it is one of them.
    """
    if not isinstance(stored, dict):
        return
    listed = stored.get("architectures") or []
    for own in (*(listed if isinstance(listed, list) else ()), stored.get("model_type")):
        if isinstance(own, str) and own in _BY_NAME:
            raise ModelError(f"{name}: its config.json says {own}, {_BY_NAME[own]}")
