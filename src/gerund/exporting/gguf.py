"""Export the language model to GGUF, verified with llama.cpp. The file generates and does not encode.

GGUF has no attention plans, so only the base model is written: no adapter, no pooling.

To verify the file, llama.cpp tokenizes and continues a few texts. The log-probability of each token that it chooses is
compared with the model's own for the same text, and with the model's best. So tokenizer, weights and settings are
tested together, and rounding is distinguished from errors. llama.cpp keeps states in float32 whatever the weights'
dtype, and transformers in the weights' dtype. So the model is compared with its own weights and states in float32: the
rounding of half-precision states would be larger than the errors that are looked for.

Shapes: T tokens, V vocabulary.
"""

import copy
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.errors import ConfigError, ModelError, TextError
from gerund.exporting.shared import TEXTS, Export, require_installed
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.inference.generate.prompts import prompt_ids
from gerund.models.adapters import base_state
from gerund.models.architectures import NoHead
from gerund.models.gguf_architectures import LAYOUTS, Layout
from gerund.models.gguf_weights import pairs_from_halves

MODEL_FILE = "model.gguf"
_NEEDED = ("gguf", "xllamacpp")
_BLOCK = 32  # weights that share a scale in Q8_0
# llama.cpp's names of pre-tokenizers, by their regular expressions.
_LETTERS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {_LETTERS % "": "qwen2", _LETTERS % "{1,3}": "llama-bpe"}
_GPT2 = "gpt-2"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class TokenTable:
    """A tokenizer in GGUF's terms; tokens and types have one item per row of the embeddings."""

    model: str  # "gpt2" for byte-level BPE, "llama" for sentencepiece's
    pre_tokenizer: str
    tokens: list[str]
    types: list[int]
    merges: list[str]  # gpt2: pairs of tokens, in order
    scores: list[float]  # llama: tokens with higher scores are merged first
    space_before: bool  # llama: whether a space is put before a text


def token_table(tokenizer: PreTrainedTokenizerBase, rows: int) -> TokenTable:
    """Return a tokenizer in GGUF's terms, filled up to the rows of the embeddings."""
    if not tokenizer.is_fast:
        raise ConfigError("only fast tokenizers are written as GGUF, and this model's is none")
    data = json.loads(tokenizer.backend_tokenizer.to_str())
    model = data["model"]
    if model.get("type") != "BPE":
        raise ConfigError(f"a tokenizer of the kind {model.get('type')} is not written as GGUF; byte-pair encoding is")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    added = {item["id"]: item for item in data["added_tokens"]}
    by_id = {number: token for token, number in model["vocab"].items()}
    by_id.update({number: item["content"] for number, item in added.items()})
    tokens = [by_id.get(number, f"[PAD{number}]") for number in range(rows)]
    types = [_type(by_id.get(number), added.get(number), model) for number in range(rows)]
    if model.get("byte_fallback"):
        scores = _scores(tokens, merges)
        return TokenTable("llama", "default", tokens, types, [], scores, _begins_with_space(data))
    return TokenTable("gpt2", _pre_tokenizer(data), tokens, types, merges, [], False)


def _type(token: str | None, added: dict[str, Any] | None, model: dict[str, Any]) -> int:
    if token is None:
        return UNUSED
    if token == model.get("unk_token"):
        return UNKNOWN
    if added is not None:
        return CONTROL if added["special"] else USER_DEFINED
    return BYTE if model.get("byte_fallback") and _BYTE_TOKEN.fullmatch(token) else NORMAL


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Return scores with which llama.cpp, which merges the best token first, merges in the tokenizer's order."""
    rank: dict[str, int] = {}
    for number, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), number)
    return [-float(rank.get(token, len(merges))) for token in tokens]


def _begins_with_space(data: dict[str, Any]) -> bool:
    """Return whether a space is put before a text."""
    steps = _steps(data.get("normalizer"), "normalizers")
    kinds = [step["type"] for step in steps]
    before = _steps(data.get("pre_tokenizer"), "pretokenizers")
    if kinds in (["Prepend", "Replace"], ["Replace"]) and not before:
        return kinds[0] == "Prepend"
    if not kinds and [step["type"] for step in before] == ["Metaspace"] and before[0].get("prepend_scheme") != "never":
        return True
    raise _other(kinds + [step["type"] for step in before])


def _pre_tokenizer(data: dict[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer."""
    normalizers = [step["type"] for step in _steps(data.get("normalizer"), "normalizers")]
    steps = _steps(data.get("pre_tokenizer"), "pretokenizers")
    kinds = [step["type"] for step in steps]
    plain = all(not step.get("add_prefix_space") for step in steps)
    if normalizers in ([], ["NFC"]) and plain:
        if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
            return _GPT2
        pattern = steps[0].get("pattern", {}).get("Regex") if kinds == ["Split", "ByteLevel"] else None
        if pattern in _PRE_TOKENIZERS and not steps[1].get("use_regex", True):
            return _PRE_TOKENIZERS[pattern]
    raise _other(normalizers + kinds)


def _steps(part: dict[str, Any] | None, several: str) -> list[dict[str, Any]]:
    if part is None:
        return []
    return list(part[several]) if part["type"] == "Sequence" else [part]


def _other(kinds: list[str]) -> ConfigError:
    return ConfigError(
        f"how this tokenizer cuts a text ({', '.join(kinds) or 'not at all'}) has no name in llama.cpp that is known "
        "here; tokenizers as GPT-2, Llama 2, Llama 3 and Qwen 2 have them are written as GGUF"
    )


# llama.cpp's architectures by transformers' names.
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def write(runtime: EncoderRuntime, work: Path, folder: Path, *, eight_bits: bool = False) -> Export:
    """Fill ``work`` with the model and a README, and verify it; ``eight_bits`` is Q8_0: 32 weights share a scale."""
    require_installed(_NEEDED, "GGUF", "gguf")
    model, tokenizer = runtime.model, runtime.tokenizer
    kind = _kind_of(model)
    table = token_table(tokenizer, model.get_input_embeddings().weight.shape[0])
    _write_file(model, tokenizer, kind, table, work / MODEL_FILE, eight_bits=eight_bits)
    worst = check(model, tokenizer, work / MODEL_FILE, eight_bits=eight_bits)
    (work / "README.md").write_text(_readme(model, worst, eight_bits=eight_bits), encoding="utf-8")
    return Export(folder, f"llama-cli -m {shlex.quote(str(folder / MODEL_FILE))}")


def _kind_of(model: PreTrainedModel) -> Layout:
    """Return the architecture's layout, or raise ``ConfigError`` if llama.cpp would compute it differently."""
    config = model.config
    name = _ARCHITECTURES.get(config.model_type)
    if name is None:
        known = ", ".join(_ARCHITECTURES)
        raise ConfigError(
            f"a {config.model_type} model is not written as GGUF; {known} are (llama.cpp's repository has a converter "
            "for others, convert_hf_to_gguf.py)"
        )
    kind = LAYOUTS[name]
    if isinstance(model.get_output_embeddings(), NoHead):
        raise ConfigError("this model was saved without an output head: it encodes, and GGUF is for generating")
    rope = config.rope_parameters.get("rope_type", "default")
    if rope not in (("default", "linear", "llama3") if "llama3" in kind.scalings else ("default",)):
        raise ConfigError(
            f"positions that are scaled by {rope!r} are not written as GGUF for a {config.model_type} model"
        )
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise ConfigError(
            f"llama.cpp does not know the sliding window of {window} tokens of a {config.model_type} model"
        )
    if config.hidden_act != "silu":
        raise ConfigError(f"llama.cpp computes a {config.model_type} model with silu, not {config.hidden_act}")
    return kind


def _write_file(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    kind: Layout,
    table: TokenTable,
    path: Path,
    *,
    eight_bits: bool,
) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, kind.name)
    _write_settings(writer, model, table, eight_bits=eight_bits)
    write_tokens(writer, tokenizer, model, table)
    for name, tensor in _tensors(model, kind).items():
        data, stored = _stored(tensor, eight_bits=eight_bits)
        writer.add_tensor(name, data, raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_settings(writer: Any, model: PreTrainedModel, table: TokenTable, *, eight_bits: bool) -> None:
    import gguf

    config = model.config
    types = gguf.LlamaFileType
    by_dtype = {torch.bfloat16: types.MOSTLY_BF16, torch.float16: types.MOSTLY_F16}
    writer.add_file_type(types.MOSTLY_Q8_0 if eight_bits else by_dtype.get(model.dtype, types.ALL_F32))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    width = _head_width(config)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(len(table.tokens))


def write_tokens(writer: Any, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel, table: TokenTable) -> None:
    """Write a tokenizer into a file."""
    writer.add_tokenizer_model(table.model)
    writer.add_tokenizer_pre(table.pre_tokenizer)
    writer.add_token_list(table.tokens)
    writer.add_token_types(table.types)
    if table.model == "gpt2":
        writer.add_token_merges(table.merges)
    else:
        writer.add_token_scores(table.scores)
        writer.add_add_space_prefix(table.space_before)
    ids = tokenizer("a").input_ids
    begin, ends = tokenizer.bos_token_id, _ends(tokenizer, model)
    writer.add_add_bos_token(begin is not None and ids[0] == begin)
    writer.add_add_eos_token(ids[-1] in ends)
    if begin is not None:
        writer.add_bos_token_id(begin)
    if ends:
        writer.add_eos_token_id(ends[0])
    for end in ends[1:2]:
        writer.add_eot_token_id(end)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if isinstance(tokenizer.chat_template, str):
        writer.add_chat_template(tokenizer.chat_template)


def _ends(tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> list[int]:
    """Return the end tokens, the generation config's first."""
    for ends in (model.generation_config.eos_token_id, tokenizer.eos_token_id):
        if listed := [] if ends is None else list(ends) if isinstance(ends, (list, tuple)) else [ends]:
            return listed
    return []


def _tensors(model: PreTrainedModel, kind: Layout) -> dict[str, Tensor]:
    """Return the weights by their names in GGUF."""
    import gguf

    config = model.config
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind.name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    weights: dict[str, Tensor] = {}
    for name, tensor in _untied(base_state(model), config).items():
        gguf_name = names.get_name(name, (".weight", ".bias"))
        if gguf_name is None:
            raise ConfigError(f"llama.cpp has no place for {name} of a {config.model_type} model")
        if kind.pairs and ".q_proj." in name:
            tensor = pairs_from_halves(tensor, config.num_attention_heads)
        elif kind.pairs and ".k_proj." in name:
            tensor = pairs_from_halves(tensor, config.num_key_value_heads)
        weights[gguf_name] = tensor
    factors = frequency_factors(model)
    if factors is not None:
        weights["rope_freqs.weight"] = factors
    return weights


def _untied(state: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Return the weights without a tied output head."""
    return {
        name: tensor for name, tensor in state.items() if not (config.tie_word_embeddings and name == "lm_head.weight")
    }


def frequency_factors(model: PreTrainedModel) -> Tensor | None:
    """Return the divisor of each rotary frequency; None if the frequencies are not scaled."""
    rope = model.config.rope_parameters
    if rope.get("rope_type", "default") == "default":
        return None
    frequencies = model.base_model.rotary_emb.inv_freq.detach().float().cpu()
    steps = torch.arange(0, 2 * len(frequencies), 2).float() / (2 * len(frequencies))
    plain: Tensor = 1.0 / (float(rope["rope_theta"]) ** steps)
    return plain / frequencies


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _stored(tensor: Tensor, *, eight_bits: bool) -> tuple[np.ndarray, Any]:
    """Return a weight in eight bits or its own dtype, and vectors in float32, with GGUF's name of that."""
    import gguf

    kinds = gguf.GGMLQuantizationType
    whole = tensor.detach().cpu()
    if eight_bits and whole.dim() > 1 and whole.shape[-1] % _BLOCK == 0:
        return gguf.quants.quantize(whole.float().numpy(), kinds.Q8_0), kinds.Q8_0
    if whole.dtype == torch.bfloat16 and whole.dim() > 1:
        return whole.contiguous().view(torch.uint8).numpy(), kinds.BF16
    if whole.dtype == torch.float16 and whole.dim() > 1:
        return whole.contiguous().numpy(), kinds.F16
    return whole.float().contiguous().numpy(), kinds.F32


def _readme(model: PreTrainedModel, farthest: float, *, eight_bits: bool) -> str:
    kept = "weights in 8 bits (Q8_0)" if eight_bits else str(model.dtype).removeprefix("torch.")
    return (
        "# A language model as GGUF, exported by gerund\n\n"
        f"{model.config.model_type}, {model.config.num_hidden_layers} layers, {kept}. It generates. An encoder that "
        "gerund makes of the same weights, its attention plan and its adapter, is not in this file: llama.cpp has no "
        "such plans.\n\n"
        f'```sh\nllama-cli -m {MODEL_FILE} -p "Once upon a time"\n```\n\n'
        "Before it was put in place, llama.cpp continued a few texts by it: of each token that it chose, its "
        f"probability was within {farthest:.0e} of gerund's, in logarithms.\n"
    )


_NEW_TOKENS = 16
_CONTEXT = 512
# Largest difference of log-probabilities. llama.cpp rounds the inputs of half-precision weights.
_NEAR = {torch.float32: 2e-3, torch.float64: 2e-3}
_NEAR_HALF = 0.25
_NEAR_IN_EIGHT_BITS = 0.5


def check(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, path: Path, *, eight_bits: bool = False) -> float:
    """Let llama.cpp continue texts, and return the largest difference of log-probabilities; too large is an error."""
    near = _NEAR_IN_EIGHT_BITS if eight_bits else _NEAR.get(model.dtype, _NEAR_HALF)
    exact = _with_float32_states(model)
    context = min(_CONTEXT, model.config.max_position_embeddings)
    server = _attempt(lambda: serve(path, context))
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


def _difference(model: PreTrainedModel, ids: list[int], chosen: list[dict[str, Any]]) -> float:
    """Return how far llama.cpp's log-probabilities are from the model's, and its choices from the model's best."""
    new = [int(token["id"]) for token in chosen]
    if not new:
        return 0.0
    logprobs_TV = _log_probabilities(model, [*ids, *new])[len(ids) - 1 : -1]
    expected_T = logprobs_TV[torch.arange(len(new)), torch.tensor(new)]
    actual_T = torch.tensor([float(token["logprob"]) for token in chosen])
    from_best_T = logprobs_TV.max(dim=-1).values - expected_T
    return float(torch.maximum((expected_T - actual_T).abs(), from_best_T).max())


@torch.no_grad()
def _log_probabilities(model: PreTrainedModel, ids: list[int]) -> Tensor:
    given = torch.tensor([ids], device=model.device)
    logits_TV = model(input_ids=given, use_cache=False).logits[0]
    return logits_TV.float().cpu().log_softmax(dim=-1)


def serve(path: Path, context: int) -> Any:
    """Return llama.cpp's server for a file, in this process and on a random local port."""
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
