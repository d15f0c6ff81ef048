"""Encoders as ONNX: one graph from token ids to vectors, with the attention plan baked in as masks.

The graph reads ``input_ids`` and ``attention_mask`` of texts that are padded on the right. An encoder that has prompts
and does not pool them reads ``pooled_from`` too: how many tokens of each text come before the pooled ones.

Knows: the graph, the files beside it. Does not know: where they go.
"""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from gerund.attention.bound import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.plan import ResolvedPlan
from gerund.attention.recurrent import recurrent_modules
from gerund.attention.streams import attach_streams, decoder_layers
from gerund.errors import ConfigError, MissingDependencyError, ModelError
from gerund.exporting.files import write_json
from gerund.exporting.folders import write_merged
from gerund.exporting.modules import prompt_settings
from gerund.exporting.tokenizers import TEXTS, is_fused, plain_tokenizer
from gerund.inference.encode.runtime import EncoderRuntime, encode
from gerund.inference.tokens import InputFormat, tokenize
from gerund.models import loading
from gerund.models.pooling import pool, unit
from gerund.models.sources import find

MODEL_FILE = "model.onnx"
SETTINGS_FILE = "onnx.json"
_FORMAT = 1
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
# A file of protobuf holds 2 GB at most; above this the weights lie beside the graph.
_ONE_FILE = 1 << 30
_NEAR = 1e-4
_LONG_TEXT_TOKENS = 1024
_LONGEST_DIMENSION = 1 << 20


def write(runtime: EncoderRuntime, folder: Path) -> None:
    """Fill ``folder`` with the graph, its tokenizer, ``onnx.json`` and a README, after trying the graph.

    Raises:
        ConfigError: a plan, prompt or tokenizer that another program could not follow.
        ModelError: torch cannot export the architecture, or onnxruntime computes something else.
        MissingDependencyError: ONNX is not installed.
    """
    refuse(runtime)
    with TemporaryDirectory(dir=folder) as room:
        # Read back, so that the adapter is a part of the weights, and these are float32, which every runtime has.
        write_merged(runtime, Path(room))
        model, _ = loading.read(find(Path(room)), torch.float32)
    attach(model)
    attach_streams(decoder_layers(model))
    plain = replace(runtime, model=model, adapter=None, autocast=None)
    tokenizer = plain_tokenizer(runtime)
    begins = _begins(plain)
    reads_begin = len(set(begins.values())) > 1
    _write_graph(_Graph(plain, None if reads_begin else begins[""]), folder / MODEL_FILE)
    _check(plain, tokenizer, folder / MODEL_FILE, begins, reads_begin)
    tokenizer.save_pretrained(folder)
    write_json(folder / SETTINGS_FILE, _settings(runtime, begins, reads_begin))
    (folder / "README.md").write_text(_readme(runtime, reads_begin), encoding="utf-8")


def refuse(runtime: EncoderRuntime) -> None:
    """Refuse what cannot be a graph, or what no program but gerund could prepare the input of."""
    absent = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingDependencyError(f"an export to ONNX needs {', '.join(absent)}: pip install 'gerund[onnx]'")
    if runtime.plan.repeats_text:
        raise ConfigError(f"the plan {runtime.config.attention.name!r} reads a text twice; ONNX is for the other plans")
    if recurrent_modules(runtime.model):
        kind = runtime.model.config.model_type
        raise ConfigError(f"this {kind} model has recurrent layers, which gerund does not export to ONNX")
    if not runtime.tokenizer.is_fast:
        raise ConfigError("only fast tokenizers are a file that other programs read, and this model's is none")
    if runtime.config.pool_prompt:
        return
    fused = next((one for one in _prompts(runtime) if one and is_fused(runtime, one)), None)
    if fused is not None:
        raise ConfigError(
            f"the last token of the prompt {fused!r} can reach into the text, so that no number says where the text "
            "begins; a prompt that does not end in a space avoids it"
        )


class _Masks(BoundPlan):
    """A plan for whatever batch comes: nothing is decided by this batch's own padding and length."""

    def __init__(self, plan: ResolvedPlan, real_BT: Tensor) -> None:
        super().__init__(plan)
        self.side, self.real_BT = "mixed", real_BT

    def _width(self, length: int) -> int:
        del length
        return _LONGEST_DIMENSION


class _Graph(nn.Module):
    """From token ids to states and vectors; ``begin`` is None where it is an input."""

    def __init__(self, runtime: EncoderRuntime, begin: int | None) -> None:
        super().__init__()
        self.body = runtime.model.base_model
        self.runtime = runtime
        self.begin = begin

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pooled_from: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        config, real_BT = self.runtime.config, attention_mask.bool()
        # Padding on the right is nothing to a causal pass, which needs no plan.
        plan = _Masks(self.runtime.plan, real_BT) if self.runtime.sends_plan else None
        extra = {} if plan is None else {"attention_plan": plan}
        hidden_BTD = self.body(input_ids=input_ids, use_cache=False, **extra).last_hidden_state
        if plan is not None:
            plan.check_all_asked(self.runtime.model.config.model_type)
        first = torch.tensor([self.begin or 0]) if pooled_from is None else pooled_from
        place_T = torch.arange(input_ids.shape[1], device=input_ids.device)
        vectors_BD = pool(hidden_BTD, real_BT & (place_T >= first[:, None]), config.pooling)
        if config.normalize:
            vectors_BD = nn.functional.normalize(vectors_BD, dim=-1)
        return vectors_BD, hidden_BTD


def _write_graph(graph: _Graph, path: Path) -> None:
    runtime = graph.runtime
    longest = min(runtime.max_length or _LONGEST_DIMENSION, _LONGEST_DIMENSION)
    rows, length = torch.export.Dim("texts", min=1), torch.export.Dim("tokens", min=1, max=longest)
    ids_BT = torch.full((2, min(16, longest)), 3, dtype=torch.long)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, ids_BT.shape[1] // 2 :] = 0
    inputs: dict[str, Tensor] = {"input_ids": ids_BT, "attention_mask": mask_BT}
    shapes: dict[str, dict[int, Any]] = {name: {0: rows, 1: length} for name in inputs}
    if graph.begin is None:
        inputs["pooled_from"], shapes["pooled_from"] = torch.ones(2, dtype=torch.long), {0: rows}
    try:
        with torch.no_grad(), _silence():
            program = torch.onnx.export(
                graph.eval(),
                kwargs=inputs,
                dynamo=True,
                verbose=False,
                input_names=list(inputs),
                output_names=["sentence_embedding", "token_embeddings"],
                dynamic_shapes=shapes,
            )
            assert program is not None
            size = sum(weight.nbytes for weight in graph.parameters())
            program.save(str(path), external_data=size > _ONE_FILE)
    except Exception as error:
        kind = runtime.model.config.model_type
        reason = " ".join(str(error).split())[:160]
        raise ModelError(f"torch cannot export this {kind} model to ONNX ({type(error).__name__}: {reason})") from error


def _check(
    runtime: EncoderRuntime, tokenizer: PreTrainedTokenizerBase, path: Path, begins: dict[str, int], reads_begin: bool
) -> None:
    """Let onnxruntime read texts of many kinds, and compare its vectors with gerund's."""
    session = _demand(runtime, lambda ort: ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]))
    texts = list(TEXTS)
    cut = {} if runtime.max_length is None else {"truncation": True, "max_length": runtime.max_length}
    if runtime.max_length is not None and runtime.max_length <= _LONG_TEXT_TOKENS:
        texts.append(" so on" * runtime.max_length)
    for prompt, begin in begins.items():
        batch = tokenizer([prompt + text for text in texts], padding=True, return_tensors="np", **cut)
        given = {name: np.asarray(batch[name], dtype=np.int64) for name in ("input_ids", "attention_mask")}
        if reads_begin:
            given["pooled_from"] = np.full(len(texts), begin, dtype=np.int64)
        [theirs] = _demand(runtime, partial(_run, session, given))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a text is cut is what is tried
            ours = encode(runtime, tokenize(runtime.tokenizer, texts, _input_format(runtime, prompt)), show=False)
        distance = float((1 - (unit(theirs) * unit(ours)).sum(axis=1)).max())
        if not distance <= _NEAR:
            raise ModelError(f"onnxruntime computes other vectors than gerund (cosine distance {distance:.1g})")


def _run(session: Any, given: dict[str, np.ndarray], _: Any) -> Any:
    return session.run(["sentence_embedding"], given)


def _demand(runtime: EncoderRuntime, step: Callable[[Any], Any]) -> Any:
    """Return what onnxruntime makes of the graph.

    Raises:
        ModelError: nothing.
    """
    import onnxruntime

    try:
        return step(onnxruntime)
    except Exception as error:
        kind, reason = runtime.model.config.model_type, " ".join(str(error).split())[:160]
        raise ModelError(f"this {kind} model cannot be exported: onnxruntime refuses its graph ({reason})") from error


def _prompts(runtime: EncoderRuntime) -> list[str]:
    """Return all prompts, none first."""
    return list(dict.fromkeys(["", *prompt_settings(runtime.config)[0].values()]))


def _begins(runtime: EncoderRuntime) -> dict[str, int]:
    """Return for each prompt how many tokens come before the pooled ones."""
    found = {}
    for prompt in _prompts(runtime):
        [tokens] = tokenize(runtime.tokenizer, ["a"], _input_format(runtime, prompt))
        assert tokens is not None
        found[prompt] = runtime.pool_from(tokens)
    return found


def _input_format(runtime: EncoderRuntime, prompt: str) -> InputFormat:
    return InputFormat(prompt=prompt, append_eos=runtime.config.append_eos, max_length=runtime.max_length)


def _settings(runtime: EncoderRuntime, begins: dict[str, int], reads_begin: bool) -> dict[str, Any]:
    prompts, default = prompt_settings(runtime.config)
    by_name = {"": begins[""], **{name: begins[text] for name, text in prompts.items()}}
    return {
        "format": _FORMAT,
        "attention": runtime.config.attention.with_defaults(runtime.n_layers).name,
        "dimensions": runtime.width,
        "max_length": runtime.max_length,
        "normalized": runtime.config.normalize,
        "prompts": prompts,
        "default_prompt_name": default,
        "pooled_from": by_name if reads_begin else {},
    }


def _readme(runtime: EncoderRuntime, reads_begin: bool) -> str:
    plan = runtime.config.attention.with_defaults(runtime.n_layers)
    cut = "" if runtime.max_length is None else f"tokenizer.enable_truncation({runtime.max_length})\n"
    pad = plain_tokenizer(runtime)
    more, note = "", "It reads no prompt."
    if reads_begin:
        more = '    "pooled_from": np.zeros(len(ids), dtype=np.int64) + begin,\n'
        note = (
            "A prompt is put before each text and not pooled. `onnx.json` names the prompts, and says for each how "
            "many tokens come before the pooled ones; under the name `` that is for a text without a prompt."
        )
    begin = f"begin = {_begins(runtime)['']}  # without a prompt; see onnx.json\n" if reads_begin else ""
    return (
        "# A text encoder in ONNX, exported by gerund\n\n"
        f"Attention plan `{plan.name}`, {runtime.config.pooling} pooling, {runtime.width} dimensions, float32. "
        "gerund, torch and transformers are not needed:\n\n"
        "```python\nimport numpy as np\nimport onnxruntime\nfrom tokenizers import Tokenizer\n\n"
        'tokenizer = Tokenizer.from_file("tokenizer.json")\n'
        f"tokenizer.enable_padding(pad_id={pad.pad_token_id}, pad_token={pad.pad_token!r})\n{cut}{begin}"
        f'session = onnxruntime.InferenceSession("{MODEL_FILE}")\n'
        'ids = tokenizer.encode_batch(["a text", "another one"])\n'
        "vectors, states = session.run(None, {\n"
        '    "input_ids": np.array([one.ids for one in ids]),\n'
        '    "attention_mask": np.array([one.attention_mask for one in ids]),\n'
        f"{more}}})\n```\n\n{note}\n"
    )


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the exporter: what it says is about operators that are not used here."""
    noisy = [logging.getLogger(name) for name in ("torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
    levels = [one.level for one in noisy]
    for one in noisy:
        one.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for one, level in zip(noisy, levels, strict=True):
            one.setLevel(level)
