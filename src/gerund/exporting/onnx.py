"""Export an encoder to ONNX: one graph from token ids to vectors, verified with onnxruntime.

The graph contains the attention plan and reads ``input_ids`` and ``attention_mask`` of texts that are padded on the
right. For an encoder with prompts that it does not pool, it also reads ``pooled_from``: how many tokens of each text
come before the pooled ones.

Shapes: B texts, T tokens, D dimensions.
"""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.attention.recurrent import recurrent_modules
from gerund.errors import ConfigError, MissingDependencyError, ModelError
from gerund.exporting.shared import TEXTS, is_fused, plain_tokenizer, write_merged
from gerund.inference.encode.runtime import ENOUGH_IN_INT8, EncoderRuntime, encode
from gerund.inference.tokens import InputFormat, tokenize
from gerund.models import loading
from gerund.models.sentence_transformers_folder import prompt_settings, write_json
from gerund.models.sources import find
from gerund.models.vectors import unit
from gerund.poolings import pool
from gerund.settings.plan import ResolvedPlan

INPUTS = ("input_ids", "attention_mask")
POOLED_FROM = "pooled_from"
VECTORS, STATES = "sentence_embedding", "token_embeddings"
# The largest cosine distance between the vectors of another program and ours.
NEAR = 1e-4
_FORMAT = 1
_LONG_TEXT_TOKENS = 1024
LONGEST_DIMENSION = 1 << 20

Run = Callable[[Mapping[str, np.ndarray]], np.ndarray]
"""What another program is asked by: the graph's inputs by name in, vectors out."""


@dataclass(frozen=True)
class Prepared:
    """An encoder that is ready to become a graph.

    Attributes:
        runtime: the encoder, its adapter a part of its weights, in float32, which every program has.
        tokenizer: does by itself what gerund does around a text.
        begins: for each prompt, how many tokens come before the pooled ones.
    """

    runtime: EncoderRuntime
    tokenizer: PreTrainedTokenizerBase
    begins: dict[str, int]

    @property
    def reads_begin(self) -> bool:
        """Whether the graph reads ``pooled_from``: not all texts are pooled from the same token on."""
        return len(set(self.begins.values())) > 1

    @property
    def nbytes(self) -> int:
        """How many bytes the weights take."""
        return sum(weight.nbytes for weight in self.runtime.model.base_model.parameters())

    @property
    def kind(self) -> str:
        """The architecture's name."""
        return str(self.runtime.model.config.model_type)

    def graph(self) -> "Graph":
        """Return the module whose ``forward`` is the graph."""
        return Graph(self.runtime, None if self.reads_begin else self.begins[""])


def prepare(runtime: EncoderRuntime, folder: Path) -> Prepared:
    """Return the encoder with its adapter merged in; ``folder`` is written to for a moment."""
    with TemporaryDirectory(dir=folder) as room:
        write_merged(runtime, Path(room))
        model, _ = loading.read(find(Path(room)), torch.float32)
    attach(model)
    attach_streams(decoder_layers(model))
    plain = replace(runtime.in_own_type(), model=model, adapter=None)
    return Prepared(plain, plain_tokenizer(runtime), _begins(plain))


def refuse(runtime: EncoderRuntime, name: str) -> None:
    """Refuse what cannot be a graph, or what no program but gerund could prepare the input of."""
    if runtime.plan.repeats_text:
        plan = runtime.config.attention.name
        raise ConfigError(f"the plan {plan!r} reads a text twice; {name} is for the other plans")
    if recurrent_modules(runtime.model):
        kind = runtime.model.config.model_type
        raise ConfigError(f"this {kind} model has recurrent layers, which gerund does not export to {name}")
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
        return LONGEST_DIMENSION


class Graph(nn.Module):
    """From token ids to states and vectors; ``begin`` is None where it is an input."""

    def __init__(self, runtime: EncoderRuntime, begin: int | None) -> None:
        super().__init__()
        self.body = runtime.model.base_model
        self.head = runtime.head
        self.runtime = runtime
        self.begin = begin

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, pooled_from: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return a vector for each text ``(B, D)`` and its states ``(B, T, D)``; padding is on the right."""
        config, real_BT = self.runtime.config, attention_mask.bool()
        # Padding on the right is nothing to a causal pass, which needs no plan.
        plan = _Masks(self.runtime.plan, real_BT) if self.runtime.sends_plan else None
        extra = {} if plan is None else {"attention_plan": plan}
        hidden_BTD = self.body(input_ids=input_ids, use_cache=False, **extra).last_hidden_state
        if plan is not None:
            plan.check_all_asked(self.runtime.model.config.model_type)
        first = torch.tensor([self.begin or 0]) if pooled_from is None else pooled_from
        place_T = torch.arange(input_ids.shape[1], device=input_ids.device)
        pooled_BT = real_BT & (place_T >= first[:, None])
        before_B = first if config.follows_sentence_transformers else None
        vectors_BD = pool(hidden_BTD, pooled_BT, config.pooling, before_B)
        if self.head is not None:
            vectors_BD = self.head(vectors_BD, input_ids, pooled_BT)
        if config.normalize:
            vectors_BD = nn.functional.normalize(vectors_BD, dim=-1)
        return vectors_BD, hidden_BTD


def compare(prepared: Prepared, run: Run, program: str, near: float = NEAR) -> float:
    """Let another program read texts of many kinds, and compare its vectors with gerund's."""
    runtime, texts, worst = prepared.runtime, list(TEXTS), 0.0
    cut = {} if runtime.max_length is None else {"truncation": True, "max_length": runtime.max_length}
    if runtime.max_length is not None and runtime.max_length <= _LONG_TEXT_TOKENS:
        texts.append(" so on" * runtime.max_length)
    for prompt, begin in prepared.begins.items():
        batch = prepared.tokenizer([prompt + text for text in texts], padding=True, return_tensors="np", **cut)
        given = {name: np.asarray(batch[name], dtype=np.int64) for name in INPUTS}
        if prepared.reads_begin:
            given[POOLED_FROM] = np.full(len(texts), begin, dtype=np.int64)
        theirs = demand(prepared.kind, program, lambda given=given: run(given))  # type: ignore[misc]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a text is cut is what is tried
            ours = encode(runtime, tokenize(runtime.tokenizer, texts, _input_format(runtime, prompt)), show=False)
        distance = float((1 - (unit(theirs) * unit(ours)).sum(axis=1)).max())
        if not distance <= near:
            raise ModelError(f"{program} computes other vectors than gerund (cosine distance {distance:.1g})")
        worst = max(worst, distance)
    return worst


def demand(kind: str, program: str, step: Callable[[], Any]) -> Any:
    """Return what another program makes of the graph."""
    try:
        return step()
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelError(f"this {kind} model cannot be exported: {program} refuses its graph ({reason})") from error


def settings(prepared: Prepared) -> dict[str, Any]:
    """Return what a program has to know about the graph that the graph does not say."""
    runtime, begins = prepared.runtime, prepared.begins
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
        "pooled_from": by_name if prepared.reads_begin else {},
    }


def readme(
    prepared: Prepared,
    title: str,
    imports: str,
    opened: str,
    asked: str,
    settings_file: str,
    weights: str = "float32",
) -> str:
    """Return a README whose program reads texts with nothing but tokenizers, numpy and the other program."""
    runtime = prepared.runtime
    plan = runtime.config.attention.label(runtime.n_layers)
    cut = "" if runtime.max_length is None else f"tokenizer.enable_truncation({runtime.max_length})\n"
    pad = prepared.tokenizer
    prompts, _ = prompt_settings(runtime.config)
    named = f"`{settings_file}` names the prompts and which of them gerund takes; this program adds none."
    more, note, begin = "", f"A prompt is put before each text. {named}" if prompts else "It reads no prompt.", ""
    if prepared.reads_begin:
        more = f'    "{POOLED_FROM}": np.zeros(len(ids), dtype=np.int64) + begin,\n'
        begin = f"begin = {prepared.begins['']}  # without a prompt; see {settings_file}\n"
        note = (
            f"A prompt is put before each text and not pooled. `{settings_file}` names the prompts, and says for each "
            "how many tokens come before the pooled ones; under the name `` that is for a text without a prompt."
        )
    before, after = asked.split("...")
    return (
        f"# {title}\n\n"
        f"Attention plan `{plan}`, {runtime.config.pooling} pooling, {runtime.width} dimensions, {weights}. "
        "gerund, torch and transformers are not needed:\n\n"
        f"```python\nimport numpy as np\n{imports}\nfrom tokenizers import Tokenizer\n\n"
        'tokenizer = Tokenizer.from_file("tokenizer.json")\n'
        f"tokenizer.enable_padding(pad_id={pad.pad_token_id}, pad_token={pad.pad_token!r})\n{cut}{begin}"
        f"{opened}\n"
        'ids = tokenizer.encode_batch(["a text", "another one"])\n'
        f"{before}{{\n"
        '    "input_ids": np.array([one.ids for one in ids]),\n'
        '    "attention_mask": np.array([one.attention_mask for one in ids]),\n'
        f"{more}}}{after}\n```\n\n{note}\n"
    )


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
    config = runtime.config
    return InputFormat(
        prompt=prompt,
        append_eos=config.append_eos,
        max_length=runtime.max_length,
        normalizes=config.normalizes_texts,
        follows_sentence_transformers=config.follows_sentence_transformers,
    )


MODEL_FILE = "model.onnx"
SETTINGS_FILE = "onnx.json"
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
# A file of protobuf holds 2 GB at most; above this the weights lie beside the graph.
_ONE_FILE = 1 << 30


def write(runtime: EncoderRuntime, folder: Path, *, eight_bits: bool = False) -> None:
    """Fill ``folder`` with the graph, its tokenizer, ``onnx.json`` and a README, after trying the graph."""
    demand_installed(_NEEDED, "ONNX", "onnx")
    refuse(runtime, "ONNX")
    prepared = prepare(runtime, folder)
    if eight_bits and prepared.nbytes > _ONE_FILE:
        raise ConfigError("weights of more than a gigabyte are not written in 8 bits; export as onnx")
    write_graph(prepared, folder / MODEL_FILE)
    check(prepared, folder / MODEL_FILE)
    weights, told = "float32", {}
    if eight_bits:
        quantize(folder / MODEL_FILE)
        cosine = round(1 - check(prepared, folder / MODEL_FILE, 1 - ENOUGH_IN_INT8), 5)
        weights, told = f"weights in 8 bits (cosine to gerund's vectors at least {cosine})", {"cosine": cosine}
    prepared.tokenizer.save_pretrained(folder)
    write_json(folder / SETTINGS_FILE, {**settings(prepared), **told})
    text = readme(
        prepared,
        "A text encoder in ONNX, exported by gerund",
        "import onnxruntime",
        f'session = onnxruntime.InferenceSession("{MODEL_FILE}")',
        "vectors, states = session.run(None, ...)",
        SETTINGS_FILE,
        weights,
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def demand_installed(modules: tuple[str, ...], what: str, extra: str) -> None:
    """Refuse an export that needs what is not installed."""
    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingDependencyError(f"an export to {what} needs {', '.join(absent)}: pip install 'gerund[{extra}]'")


def write_graph(prepared: Prepared, path: Path) -> None:
    """Write the graph, its weights in it or, where these are large, beside it."""
    graph = prepared.graph()
    longest = min(prepared.runtime.max_length or LONGEST_DIMENSION, LONGEST_DIMENSION)
    rows, length = torch.export.Dim("texts", min=1), torch.export.Dim("tokens", min=1, max=longest)
    ids_BT = torch.full((2, min(16, longest)), 3, dtype=torch.long)
    mask_BT = torch.ones_like(ids_BT)
    mask_BT[1, ids_BT.shape[1] // 2 :] = 0
    inputs: dict[str, Tensor] = dict(zip(INPUTS, (ids_BT, mask_BT), strict=True))
    shapes: dict[str, dict[int, Any]] = {name: {0: rows, 1: length} for name in inputs}
    if graph.begin is None:
        inputs[POOLED_FROM], shapes[POOLED_FROM] = torch.ones(2, dtype=torch.long), {0: rows}
    try:
        with torch.no_grad(), _silence():
            program = torch.onnx.export(
                graph.eval(),
                kwargs=inputs,
                dynamo=True,
                verbose=False,
                input_names=list(inputs),
                output_names=[VECTORS, STATES],
                dynamic_shapes=shapes,
            )
            assert program is not None
            program.save(str(path), external_data=prepared.nbytes > _ONE_FILE)
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelError(
            f"torch cannot export this {prepared.kind} model to ONNX ({type(error).__name__}: {reason})"
        ) from error


def quantize(path: Path) -> None:
    """Put eight bits in the place of float32 wherever something is multiplied with a weight."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain = path.with_name("plain.onnx")
    options = onnxruntime.SessionOptions()
    # Weights stand in the graph as torch has them, to be transposed each time, and would not be taken for weights.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(plain)
    options.log_severity_level = 3
    with _silence():
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        # Seven of the eight bits: products of eight overflow on processors with AVX2 that lack VNNI (cosines of 0.91).
        quantize_dynamic(str(plain), str(path), per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
    plain.unlink()


def check(prepared: Prepared, path: Path, near: float = NEAR) -> float:
    """Compare what onnxruntime makes of the graph with gerund's vectors."""
    import onnxruntime

    def opened() -> Any:
        return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    session = demand(prepared.kind, "onnxruntime", opened)

    def run(given: Mapping[str, np.ndarray]) -> np.ndarray:
        [vectors_BD] = session.run([VECTORS], dict(given))
        return np.asarray(vectors_BD)

    return compare(prepared, run, "onnxruntime", near)


@contextmanager
def _silence() -> Iterator[None]:
    """Silence the exporter: what it says is about operators that are not used here."""
    noisy = [logging.getLogger(name) for name in ("", "torch.onnx", "torch.export", "onnxscript", "onnx_ir")]
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
