"""Verify a GGUF file with llama.cpp: it tokenizes and continues texts, or embeds them, as the model that gerund reads.

The log-probability of each token that llama.cpp chooses is compared with the model's own for the same text, and with
the model's best. So tokenizer, weights and settings are tested together, and rounding is distinguished from errors.
llama.cpp keeps states in float32 whatever the weights' dtype, and transformers in the weights' dtype. So the model is
compared with its own weights and states in float32: the rounding of half-precision states would be larger than the
errors that are looked for.

Shapes: D dimensions, N texts, T tokens, V vocabulary.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.errors import ModelError, TextError
from gerund.exporting.shared import TEXTS
from gerund.inference.generate.prompts import prompt_ids

_NEW_TOKENS = 16
CONTEXT = 512
"""Most tokens of a text that a file is verified with."""
# Largest difference of log-probabilities. llama.cpp rounds the inputs of half-precision weights.
_NEAR = {torch.float32: 2e-3, torch.float64: 2e-3}
_NEAR_HALF = 0.25
# Largest mean difference with quantized weights, whose inputs llama.cpp rounds to 8 bits. Of SmolLM2 135M it is 0.04 to
# 0.09, but 1.3 for a single token.
_NEAR_QUANTIZED = 0.25


def check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, *, quantized: bool = False) -> float:
    """Let llama.cpp continue texts; return the largest difference of log-probabilities; too far is an error."""
    near = _NEAR_QUANTIZED if quantized else _NEAR.get(model.dtype, _NEAR_HALF)
    exact = _with_float32_states(model)
    context = min(CONTEXT, model.config.max_position_embeddings)
    server = _attempt(lambda: serve(path, context))
    differences: list[float] = []
    for text in (*TEXTS, *(text[: len(text) // 2].rstrip() for text in TEXTS)):
        try:
            ids = prompt_ids(model, tokenizer, text)
        except TextError:
            continue  # longer than this model's context
        if len(ids) + 2 > context:
            continue
        chosen = _continued(server, text, ids, min(_NEW_TOKENS, context - len(ids) - 1))
        differences += _differences(exact, ids, chosen)
    if not differences:
        raise ModelError("llama.cpp continued none of the texts that the file was tried on by a whole character")
    typical = sum(differences) / len(differences) if quantized else max(differences)
    if not typical <= near:
        raise ModelError(
            f"llama.cpp finds other continuations probable than gerund (log-probabilities differ by {typical:.2g}, and "
            f"rounding explains {near:g}); try dtype float32, or llama.cpp's own convert_hf_to_gguf.py"
        )
    return max(differences)


def _continued(server: Any, text: str, ids: list[int], count: int) -> list[dict[str, Any]]:
    """Return llama.cpp's continuation of a text: each token's ``id`` and ``logprob``."""
    for max_tokens in (count, 1):
        answer = _attempt(partial(_ask, server, text, max_tokens))
        prompt_tokens, completion_tokens = answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]
        if prompt_tokens != len(ids):
            raise ModelError(f"llama.cpp reads {text!r} as {prompt_tokens} tokens, and the tokenizer as {len(ids)}")
        chosen = (answer["choices"][0].get("logprobs") or {}).get("content") or []
        # The list omits tokens that are parts of a character; then it can't be used.
        if len(chosen) == completion_tokens:
            return list(chosen)
    return []


def _with_float32_states(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same weights, in the same memory, whose states are float32.

    Each module has its weights in float32 only while it runs, since all of them may not fit the memory.
    """
    if model.dtype in _NEAR:
        return model
    memory = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copied = copy.deepcopy(model, memory)
    for module in copied.modules():
        if stored := dict(module.named_parameters(recurse=False)):
            module.register_forward_pre_hook(partial(_hold, stored, torch.float32))
            module.register_forward_hook(partial(_hold, stored, None), always_call=True)
    return copied


def _hold(stored: Mapping[str, nn.Parameter], dtype: torch.dtype | None, module: nn.Module, *_: Any) -> None:
    """Set a module's parameters to the stored ones, or to copies in another dtype."""
    for name, parameter in stored.items():
        copied = parameter if dtype is None else nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        setattr(module, name, copied)


def _differences(model: PreTrainedModel, ids: list[int], chosen: list[dict[str, Any]]) -> list[float]:
    """Return how far llama.cpp's log-probabilities are from the model's, or its choices from the model's best."""
    new = [int(token["id"]) for token in chosen]
    if not new:
        return []
    logprobs_TV = log_probabilities(model, [*ids, *new])[len(ids) - 1 : -1]
    expected_T = logprobs_TV[torch.arange(len(new)), torch.tensor(new)]
    actual_T = torch.tensor([float(token["logprob"]) for token in chosen])
    from_best_T = logprobs_TV.max(dim=-1).values - expected_T
    differences: list[float] = torch.maximum((expected_T - actual_T).abs(), from_best_T).tolist()
    return differences


@torch.no_grad()
def log_probabilities(model: PreTrainedModel, ids: list[int]) -> Tensor:
    """Return the log-probabilities ``(T, V)`` of the token after each."""
    given = torch.tensor([ids], device=model.device)
    logits_TV = model(input_ids=given, use_cache=False).logits[0]
    return logits_TV.float().cpu().log_softmax(dim=-1)


def embeddings(path: Path, texts: Sequence[str], context: int) -> np.ndarray:
    """Return llama.cpp's vectors ``(N, D)`` of texts, pooled as the file says, of length 1."""
    server = _attempt(lambda: serve(path, context, embeds=True))
    answer = _attempt(lambda: server.handle_embeddings({"input": list(texts)}))
    return np.array([item["embedding"] for item in answer["data"]], dtype=np.float32)


def serve(path: Path, context: int, *, embeds: bool = False) -> Any:
    """Return llama.cpp's server for a file, in this process and on a random local port."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.offline = True
    params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
    params.n_ctx, params.n_parallel, params.n_gpu_layers = min(CONTEXT, context), 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = False
    params.embedding = embeds
    params.verbosity = -1
    return xllamacpp.Server(params)


def _ask(server: Any, text: str, count: int) -> dict[str, Any]:
    body = {"prompt": text, "max_tokens": count, "temperature": 0.0, "logprobs": 1, "cache_prompt": False}
    answer: dict[str, Any] = server.handle_completions(body)
    return answer


def _attempt(step: Any) -> Any:
    """Run a step of llama.cpp; its error becomes a ``ModelError``."""
    try:
        return step()
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelError(f"llama.cpp refuses the file ({reason})") from error
