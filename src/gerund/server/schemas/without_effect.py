"""Fields that clients send and that gerund accepts without acting on them, per route.

Every other field that a body's class does not declare is refused by name, since leaving it out in silence would give
another answer than the client asked for. Accepted are two kinds:

* fields that change no answer anywhere, such as ``user`` or ``cache_prompt``, with any value (``ANY``);
* fields that change the answer of the server that they come from, with the values that mean "as usual" there, which is
  what gerund does.

``null`` is always the same as leaving a field out and is in no list.

Knows: the fields of OpenAI's, vLLM's, llama.cpp's, Cohere's, Jina's and text-embeddings-inference's requests. Does not
know: what gerund's own fields are.
"""

from collections.abc import Mapping
from typing import Any, Final

ANY: Final = object()
"""Means that a field is accepted with any value."""

Accepted = Mapping[str, Any]
"""By a field's name the tuple of values that are accepted, or ``ANY``."""

# Bookkeeping, billing, caching and scheduling: what every client library may add to every request.
EVERYWHERE: Accepted = {
    # OpenAI
    **dict.fromkeys(("user", "metadata", "store", "service_tier", "safety_identifier"), ANY),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"), ANY),
    # vLLM; Cohere has priority as well
    **dict.fromkeys(("request_id", "session_id", "priority", "cache_salt"), ANY),
    # Ollama
    "keep_alive": ANY,
    # What the Python SDKs merge into a body; some clients send it as it is.
    "extra_body": ({},),
}

_OPENAI_WRITING: Accepted = {
    "parallel_tool_calls": ANY,  # tools themselves are refused
    "prediction": ANY,  # speeds a text up and changes none
    "verbosity": ("medium",),
}

_VLLM_WRITING: Accepted = {
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": ANY,  # of special tokens, which are not shown
    "detokenize": (True,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "include_reasoning": (True,),
    "guided_decoding_backend": ANY,
    "stream_interval": ANY,
    "logits_processors": ([],),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_token_ids", "return_token_offsets"), (False,)),
    "return_prompt_text": (False,),
    **dict.fromkeys(("kv_transfer_params", "ec_transfer_params", "vllm_xargs"), ({},)),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), ({},)),
}

_LLAMA_CPP: Accepted = {
    # Where and how fast it is computed.
    **dict.fromkeys(("cache_prompt", "id_slot", "slot_id", "parse_tool_calls"), ANY),
    **dict.fromkeys(("speculative.n_max", "speculative.n_min", "speculative.p_min"), ANY),
    # Samplers that are off, and the settings that only matter when they are on.
    **dict.fromkeys(("mirostat", "dynatemp_range", "xtc_probability", "dry_multiplier", "n_probs", "n_keep"), (0,)),
    **dict.fromkeys(("mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold"), ANY),
    **dict.fromkeys(("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"), ANY),
    **dict.fromkeys(("repeat_penalty", "tfs_z"), (1,)),
    "repeat_last_n": ANY,
    "min_keep": (0,),
    **dict.fromkeys(("n_indent", "t_max_prompt_ms", "t_max_predict_ms"), (0, -1)),
    **dict.fromkeys(("lora", "response_fields"), ([],)),
    # Additions to the answer that are off.
    **dict.fromkeys(("penalize_nl", "post_sampling_probs", "return_tokens", "return_progress"), (False,)),
    "timings_per_token": (False,),
    "reasoning_format": ("none", "auto"),
}

WRITING: Accepted = {**_OPENAI_WRITING, **_VLLM_WRITING, **_LLAMA_CPP}
CHAT: Accepted = {**WRITING, "echo": (False,), "add_special_tokens": (False,), "documents": ([],)}
COMPLETION: Accepted = {**WRITING, "add_special_tokens": (True,)}
INFILL: Accepted = {**_LLAMA_CPP, "input_extra": ([],), "prompt": ("",), "stop": ([],)}

STREAM_OPTIONS: Accepted = {"include_obfuscation": ANY, "continuous_usage_stats": (False,)}
JSON_SCHEMA: Accepted = {"description": ANY}
RESPONSE_FORMAT: Accepted = {"name": ANY, "strict": ANY, "description": ANY}
STRUCTURED_OUTPUTS: Accepted = {
    **dict.fromkeys(("backend", "_backend", "disable_fallback"), ANY),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (False,)),
}
PART: Accepted = {"cache_control": ANY, "annotations": ANY}
# What answers have beside their text, and clients send back; ids and caches.
MESSAGE: Accepted = {
    **dict.fromkeys(("id", "annotations", "cache_control", "provider_specific_fields"), ANY),
    **dict.fromkeys(("reasoning_content", "reasoning", "refusal"), ("",)),
    **dict.fromkeys(("images", "thinking_blocks"), ([],)),
    "prefix": (False,),
    "type": ("message",),
}

EMBEDDING: Accepted = {
    # vLLM and Infinity
    "add_special_tokens": (True,),
    "modality": ("text",),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "mm_processor_kwargs": ({},),
    # Jina, Voyage, Mistral
    "embedding_type": ("float",),
    "output_dtype": ("float",),
    "late_chunking": (False,),
}
RERANK: Accepted = {
    # Cohere
    "rank_fields": (["text"], []),
    "max_chunks_per_doc": (10,),
    "relevant_spans": (False,),
    # Jina, Voyage, Infinity, vLLM: long documents are cut, as here
    **dict.fromkeys(("truncation", "truncate", "add_special_tokens"), (True,)),
    "truncate_prompt_tokens": (-1,),
    **dict.fromkeys(("raw_scores", "return_embeddings"), (False,)),
    "mm_processor_kwargs": ({},),
}
TEI_RERANK: Accepted = {"truncation_direction": ("Right", "right")}
SCORE: Accepted = {"add_special_tokens": (True,), "truncate_prompt_tokens": (-1,), "mm_processor_kwargs": ({},)}
TOKENIZE: Accepted = {
    **dict.fromkeys(("return_token_strs", "with_pieces", "parse_special"), (False,)),
    "tools": ([],),
    "mm_processor_kwargs": ({},),
}


def is_accepted(accepted: Accepted, name: str, value: Any) -> bool:
    """Whether a field that is not declared may be left out in silence.

    >>> is_accepted(WRITING, "mirostat", 0), is_accepted(WRITING, "mirostat", 2), is_accepted(WRITING, "x", None)
    (True, False, True)
    """
    if value is None:
        return True
    values = accepted.get(name, EVERYWHERE.get(name, ()))
    return values is ANY or value in values
