"""Whether llama.cpp reads a file of GGUF as the model is meant.

llama.cpp tokenizes and continues a few texts. Of each token that it chooses, its log-probability is compared with that
which the model itself gives it behind the same text, and with the best that the model has. So tokenizer, weights and
settings are tried together, and rounding is told apart from what is wrong.

llama.cpp keeps states in float32, whatever the type of the weights, and transformers in the type of the weights. So the
model is compared as it is with its own weights and states in float32: the rounding of its states in half precision
would be larger than what is looked for.

Knows: llama.cpp's server in this process, log-probabilities. Does not know: GGUF.

Shapes: T tokens, V vocabulary.
"""

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.errors import ModelError, TextError
from gerund.exporting.tokenizers import TEXTS
from gerund.inference.generate.prompts import prompt_ids

_NEW_TOKENS = 16
_CONTEXT = 512
# Largest difference of log-probabilities. llama.cpp rounds what it multiplies with weights of half precision.
_NEAR = {torch.float32: 2e-3, torch.float64: 2e-3}
_NEAR_HALF = 0.25
_NEAR_IN_EIGHT_BITS = 0.5


def check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, *, eight_bits: bool = False) -> float:
    """Let llama.cpp continue texts, and compare.

    Args:
        model: what the file was made of.
        tokenizer: its tokenizer.
        path: the file.
        eight_bits: whether its weights were rounded to eight bits.

    Returns:
        The largest difference of log-probabilities.

    Raises:
        ModelError: it refuses the file, reads other tokens, or finds other continuations probable.
    """
    near = _NEAR_IN_EIGHT_BITS if eight_bits else _NEAR.get(model.dtype, _NEAR_HALF)
    exact = _with_float32_states(model)
    context = min(_CONTEXT, model.config.max_position_embeddings)
    server = _demand(lambda: serve(path, context))
    worst, compared = 0.0, 0
    for text in (*TEXTS, *(text[: len(text) // 2].rstrip() for text in TEXTS)):
        try:
            ids = prompt_ids(model, tokenizer, text)
        except TextError:
            continue  # longer than this model's context
        if len(ids) + 2 > context:
            continue
        chosen = _continued(server, text, ids, min(_NEW_TOKENS, context - len(ids) - 1))
        worst, compared = max(worst, _difference(exact, ids, chosen)), compared + len(chosen)
    if not worst <= near:
        raise ModelError(
            f"llama.cpp finds other continuations probable than gerund (log-probabilities differ by {worst:.2g}, and "
            f"rounding explains {near:g}); try dtype float32, or llama.cpp's own convert_hf_to_gguf.py"
        )
    if not compared:
        raise ModelError("llama.cpp continued none of the texts that the file was tried on by a whole character")
    return worst


def _continued(server: Any, text: str, ids: list[int], count: int) -> list[dict[str, Any]]:
    """Return what llama.cpp writes behind a text: each token's ``id`` and ``logprob``.

    Raises:
        ModelError: it reads other tokens.
    """
    for wanted in (count, 1):
        found = _demand(partial(_ask, server, text, wanted))
        read, written = found["usage"]["prompt_tokens"], found["usage"]["completion_tokens"]
        if read != len(ids):
            raise ModelError(f"llama.cpp reads {text!r} as {read} tokens, and the tokenizer as {len(ids)}")
        chosen = (found["choices"][0].get("logprobs") or {}).get("content") or []
        # Tokens that are parts of a character are left out of the list; where one is missing, it says nothing.
        if len(chosen) == written:
            return list(chosen)
    return []


def _with_float32_states(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model with the same weights, in the same memory, whose states are float32.

    Each module has its weights in float32 only while it runs, since there may be no room for all of them.
    """
    if model.dtype in _NEAR:
        return model
    memory = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    own = copy.deepcopy(model, memory)
    for module in own.modules():
        if stored := dict(module.named_parameters(recurse=False)):
            module.register_forward_pre_hook(partial(_hold, stored, torch.float32))
            module.register_forward_hook(partial(_hold, stored, None), always_call=True)
    return own


def _hold(stored: Mapping[str, nn.Parameter], dtype: torch.dtype | None, module: nn.Module, *_: Any) -> None:
    """Give a module its parameters as they are stored, or copies of them in another type."""
    for name, parameter in stored.items():
        copied = parameter if dtype is None else nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        setattr(module, name, copied)


def _difference(model: PreTrainedModel, ids: list[int], chosen: list[dict[str, Any]]) -> float:
    """Return how far llama.cpp's log-probabilities are from ours, and its choices from our best ones."""
    new = [int(one["id"]) for one in chosen]
    if not new:
        return 0.0
    ours_TV = _log_probabilities(model, [*ids, *new])[len(ids) - 1 : -1]
    own_T = ours_TV[torch.arange(len(new)), torch.tensor(new)]
    theirs_T = torch.tensor([float(one["logprob"]) for one in chosen])
    from_best_T = ours_TV.max(dim=-1).values - own_T
    return float(torch.maximum((own_T - theirs_T).abs(), from_best_T).max())


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, ids: list[int]) -> Tensor:
    given = torch.tensor([ids], device=model.device)
    logits_TV = model(input_ids=given, use_cache=False).logits[0]
    return logits_TV.float().cpu().log_softmax(dim=-1)


def serve(path: Path, context: int) -> Any:
    """Return llama.cpp's server for a file, in this process and on an address that nobody else knows."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.offline = True
    params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
    params.n_ctx, params.n_parallel, params.n_gpu_layers = min(_CONTEXT, context), 1, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = torch.get_num_threads()
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = params.fit_params = False
    params.verbosity = -1
    return xllamacpp.Server(params)


def _ask(server: Any, text: str, count: int) -> dict[str, Any]:
    asked = {"prompt": text, "max_tokens": count, "temperature": 0.0, "logprobs": 1, "cache_prompt": False}
    found: dict[str, Any] = server.handle_completions(asked)
    return found


def _demand(step: Any) -> Any:
    """Return what llama.cpp makes of the file.

    Raises:
        ModelError: nothing.
    """
    try:
        return step()
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise ModelError(f"llama.cpp refuses the file ({reason})") from error
