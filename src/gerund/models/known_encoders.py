"""Encoder settings of published models whose folders leave them to their authors' code: GritLM and LLM2Vec.

Sources: the released code of GritLM (Muennighoff et al., 2024, "Generative Representational Instruction Tuning") and of
LLM2Vec (BehnamGhader et al., 2024, "LLM2Vec: Large Language Models Are Secretly Powerful Text Encoders").
"""

from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from gerund.errors import DataError, ModelError
from gerund.models.peft_folders import LLM2VEC_FILE, AdaptedModel, is_llm2vec
from gerund.models.sentence_transformers_folder import read_object
from gerund.settings.encoder import LLM2VEC_CONVENTIONS, ST_CONVENTIONS, EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import PLACE

_RETRIEVE = "Given a web search query, retrieve relevant passages that answer the query"
# The authors' tokenizers don't normalize texts, and both models attend in both directions.
_SHARED: dict[str, Any] = {"attention": AttentionPlan("bidir"), "pooling": "mean", "text_normalization": "none"}

GRITLM = EncoderConfig(
    **_SHARED,
    conventions=ST_CONVENTIONS,
    prompt="<|embed|>\n",
    prompts={"query": f"<|user|>\n{_RETRIEVE}\n<|embed|>\n", "document": "<|embed|>\n"},
)
"""GritLM's encoder settings; the task in its query prompt can be replaced."""

# What LLM2Vec puts around a text, by the model that it was made from.
_AROUND = {
    "Meta-Llama-3-8B-Instruct": ("<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"),
    "Mistral-7B-Instruct-v0.2": ("[INST] ", " [/INST]"),
    "Llama-2-7b-chat-hf": ("[INST] ", " [/INST]"),
    "Qwen2-1.5B-Instruct": ("<|im_start|>user\n", "<|im_end|>"),
    "Qwen2-7B-Instruct": ("<|im_start|>user\n", "<|im_end|>"),
}
_POOLINGS = {"mean": "mean", "weighted_mean": "weighted-mean", "last_token": "last"}
_LLM2VEC_LENGTH = 512


def known_encoder(config: PreTrainedConfig, adapted: AdaptedModel | None) -> EncoderConfig | None:
    """Return the encoder settings of a model that is known by its config or its adapters; None for another one."""
    if any("gritlm" in str(value).lower() for value in (getattr(config, "auto_map", None) or {}).values()):
        return GRITLM
    if adapted is not None and adapted.encoding and any(map(is_llm2vec, adapted.encoding)):
        return _llm2vec(adapted)
    return None


def _llm2vec(adapted: AdaptedModel) -> EncoderConfig:
    path = adapted.holding(LLM2VEC_FILE) / LLM2VEC_FILE
    stored = read_object(path)
    pooling = stored.get("pooling_mode", "mean")
    if pooling not in _POOLINGS:
        raise ModelError(f"{path} pools by {pooling!r}; gerund knows {', '.join(_POOLINGS)} of LLM2Vec")
    length, skips = stored.get("max_length", _LLM2VEC_LENGTH), stored.get("skip_instruction", True)
    if type(length) is not int or length < 1 or type(skips) is not bool:
        raise DataError(f"{path}: max_length is a whole number above 0, and skip_instruction is true or false")
    before, after = _AROUND.get(Path(adapted.base_name).name, ("", ""))
    around = f"{before}{PLACE}{after}" if before else ""
    return EncoderConfig(
        **{**_SHARED, "pooling": _POOLINGS[pooling]},
        conventions=LLM2VEC_CONVENTIONS,
        max_length=length,
        pool_prompt=not skips,
        pool_bos="never",
        prompt=around,
        prompts={"query": f"{before}{_RETRIEVE}: {PLACE if before else ''}{after}", "document": around},
    )
