"""Export an encoder to ONNX or OpenVINO: one graph from token ids to vectors, verified with the other runtime.

The graph contains the attention plan and reads ``input_ids`` and ``attention_mask`` of texts that are padded on the
right. For an encoder with prompts that it does not pool, it also reads ``pooled_from``: how many tokens of each text
come before the pooled ones. For OpenVINO the same graph is translated into its own form.

Importing ``openvino`` reports itself over the network where ``openvino_telemetry`` is installed, which pip installs
with it; here it is imported without.

Shapes: B texts, T tokens, D dimensions.
"""

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from gerund.attention.bound_plan import BoundPlan
from gerund.attention.recurrent import recurrent_modules
from gerund.checks import write_json
from gerund.errors import ConfigError, ModelError
from gerund.exporting.shared import (
    Export,
    doubled_start,
    is_fused,
    keeps_normalization,
    plain_tokenizer,
    read_written,
    require_installed,
    sample_texts,
    sample_tokens,
    silence,
    write_merged,
)
from gerund.inference.encode.batches import encode
from gerund.inference.encode.runtime import EncoderRuntime, smallest_cosine
from gerund.models.sentence_transformers_folder import prompt_settings
from gerund.poolings import pool
from gerund.settings.plan import ResolvedPlan

MODEL_FILE = "model.onnx"
SETTINGS_FILE = "onnx.json"
_NEEDED = ("onnx", "onnxscript", "onnxruntime")
# A protobuf file is limited to 2 GB; above this size the weights are in a separate file.
_ONE_FILE = 1 << 30
_NOISY = ("", "torch.onnx", "torch.export", "onnxscript", "onnx_ir")
INPUTS = ("input_ids", "attention_mask")
POOLED_FROM = "pooled_from"
VECTORS, STATES = "sentence_embedding", "token_embeddings"
# Largest cosine distance between the vectors of another program and gerund's.
NEAR = 1e-4
_FORMAT = 1
# Smallest cosine of vectors by weights in 8 bits; below it, something else is wrong.
_ENOUGH_IN_INT8 = 0.98
LONGEST_DIMENSION = 1 << 20

Run = Callable[[Mapping[str, np.ndarray]], np.ndarray]
"""Runs a graph in another program: from its inputs by name to vectors."""


@dataclass(frozen=True)
class Prepared:
    """An encoder that is ready to become a graph: its adapter merged in, in float32, with a plain tokenizer.

    ``begins`` is the number of tokens before the pooled ones, by prompt.
    """

    runtime: EncoderRuntime
    tokenizer: PreTrainedTokenizerBase
    begins: dict[str, int]

    @property
    def reads_begin(self) -> bool:
        """Whether the graph reads ``pooled_from``, since that number differs between prompts."""
        return len(set(self.begins.values())) > 1

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(weight.nbytes for weight in self.runtime.model.base_model.parameters())

    @property
    def kind(self) -> str:
        """The architecture's name."""
        return str(self.runtime.model.config.model_type)

    def graph(self) -> "Graph":
        """Return the module whose ``forward`` is the graph."""
        return Graph(self.runtime, None if self.reads_begin else self.begins[""])


def prepare(runtime: EncoderRuntime, folder: Path) -> Prepared:
    """Return the encoder with its adapter merged in; a temporary folder is created in ``folder``."""
    with TemporaryDirectory(dir=folder) as temporary:
        write_merged(runtime, Path(temporary))
        model, _ = read_written(Path(temporary), torch.float32)
    plain = replace(runtime.in_own_type(), model=model, adapter=None)
    begins = {}
    for prompt in _prompts(plain):
        [tokens] = sample_tokens(plain, ["a"], prompt)
        assert tokens is not None
        begins[prompt] = plain.pool_from(tokens)
    return Prepared(plain, plain_tokenizer(runtime), begins)


def check_exportable(runtime: EncoderRuntime, name: str) -> None:
    """Raise ``ConfigError`` for an encoder that can't be a graph, or whose input only gerund can prepare."""
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
    fused = next((prompt for prompt in _prompts(runtime) if prompt and is_fused(runtime, prompt)), None)
    if fused is not None:
        raise ConfigError(
            doubled_start(runtime, fused)
            or f"the last token of the prompt {fused!r} can reach into the text, so that no number says where the text "
            "begins; a prompt that does not end in a space avoids it"
        )


class _Masks(BoundPlan):
    """A plan for any batch: no decision depends on the padding and length of the batch that is traced."""

    def __init__(self, plan: ResolvedPlan, real_BT: Tensor) -> None:
        super().__init__(plan)
        self.side, self.real_BT = "mixed", real_BT

    def _width(self, length: int) -> int:
        del length
        return LONGEST_DIMENSION


class Graph(nn.Module):
    """From token ids to vectors and states; ``begin`` is None if it is an input."""

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
        # A causal pass needs no plan, since it never sees padding on the right.
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
    """Encode texts with another program, and return the largest cosine distance to gerund's vectors."""
    runtime, worst = prepared.runtime, 0.0
    texts = sample_texts(runtime)
    cut = {} if runtime.max_length is None else {"truncation": True, "max_length": runtime.max_length}
    for prompt, begin in prepared.begins.items():
        batch = prepared.tokenizer([prompt + text for text in texts], padding=True, return_tensors="np", **cut)
        given = {name: np.asarray(batch[name], dtype=np.int64) for name in INPUTS}
        if prepared.reads_begin:
            given[POOLED_FROM] = np.full(len(texts), begin, dtype=np.int64)
        theirs = attempt(prepared.kind, program, lambda given=given: run(given))  # type: ignore[misc]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a text is truncated on purpose
            ours = encode(runtime, sample_tokens(runtime, texts, prompt), show=False)
        distance = 1 - smallest_cosine(theirs, ours)
        if not distance <= near:
            raise ModelError(f"{program} computes other vectors than gerund (cosine distance {distance:.1g})")
        worst = max(worst, distance)
    return worst


def attempt(kind: str, program: str, step: Callable[[], Any]) -> Any:
    """Run a step of another program; its error becomes a ``ModelError``."""
    try:
        return step()
    except Exception as error:
        reason = " ".join(str(error).split())[:160]
        raise ModelError(f"this {kind} model cannot be exported: {program} refuses its graph ({reason})") from error


def settings(prepared: Prepared) -> dict[str, Any]:
    """Return what a program needs to know in addition to the graph."""
    runtime, begins = prepared.runtime, prepared.begins
    prompts, default = prompt_settings(runtime.config)
    by_name = {"": begins[""], **{name: begins[text] for name, text in prompts.items()}}
    return {
        "format": _FORMAT,
        "attention": runtime.config.with_defaults(runtime.n_layers).attention.name,
        "dimensions": runtime.width,
        "max_length": runtime.max_length,
        "normalized": runtime.config.normalize,
        "prompts": prompts,
        "default_prompt_name": default,
        "pooled_from": by_name if prepared.reads_begin else {},
    }


def readme(
    prepared: Prepared,
    folder: Path,
    title: str,
    imports: str,
    opened: str,
    asked: str,
    settings_file: str,
    weights: str = "float32",
) -> str:
    """Return a README with a program that needs only tokenizers, numpy and the other runtime.

    ``folder`` has the tokenizer already, and ``asked`` is the line that runs the graph, with ``...`` for its inputs.
    """
    runtime = prepared.runtime
    plan = runtime.config.plan_label(runtime.n_layers)
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
    if not keeps_normalization(runtime, folder):
        note += (
            "\n\n`tokenizer.json` normalizes texts to NFKC without invisible characters, as gerund does. transformers' "
            "`AutoTokenizer` reads it without that: normalize texts first where you use it."
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
    """Return all prompts; the first is empty."""
    return list(dict.fromkeys(["", *prompt_settings(runtime.config)[0].values()]))


def write(runtime: EncoderRuntime, work: Path, folder: Path, *, eight_bits: bool = False) -> Export:
    """Fill ``work`` with the graph, its tokenizer, ``onnx.json`` and a README, and verify the graph."""
    require_installed(_NEEDED, "ONNX", "onnx")
    check_exportable(runtime, "ONNX")
    prepared = prepare(runtime, work)
    if eight_bits and prepared.nbytes > _ONE_FILE:
        raise ConfigError("weights of more than a gigabyte are not written in 8 bits; export as onnx")
    graph = work / MODEL_FILE
    write_graph(prepared, graph)
    check(prepared, graph)
    weights, quality = "float32", {}
    if eight_bits:
        quantize(graph)
        cosine = round(1 - check(prepared, graph, 1 - _ENOUGH_IN_INT8), 5)
        weights, quality = f"weights in 8 bits (cosine to gerund's vectors at least {cosine})", {"cosine": cosine}
    prepared.tokenizer.save_pretrained(work)
    write_json(work / SETTINGS_FILE, {**settings(prepared), **quality})
    text = readme(
        prepared,
        work,
        "A text encoder in ONNX, exported by gerund",
        "import onnxruntime",
        f'session = onnxruntime.InferenceSession("{MODEL_FILE}")',
        "vectors, states = session.run(None, ...)",
        SETTINGS_FILE,
        weights,
    )
    (work / "README.md").write_text(text, encoding="utf-8")
    return Export(folder, f"onnxruntime.InferenceSession({str(folder / MODEL_FILE)!r})")


def write_graph(prepared: Prepared, path: Path) -> None:
    """Write the graph; large weights go into a separate file."""
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
        with torch.no_grad(), silence(*_NOISY):
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
    """Store the weights of matrix products in eight bits, one scale per column; onnxruntime rounds their inputs too."""
    import onnxruntime
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain = path.with_name("plain.onnx")
    options = onnxruntime.SessionOptions()
    # torch's graph transposes each weight in a node of its own, which hides it from quantize_dynamic.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(plain)
    options.log_severity_level = 3
    with silence(*_NOISY):
        onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        # Seven of the eight bits: products of eight overflow on processors with AVX2 that lack VNNI (cosines of 0.91).
        quantize_dynamic(str(plain), str(path), per_channel=True, reduce_range=True, weight_type=QuantType.QInt8)
    plain.unlink()


def check(prepared: Prepared, path: Path, near: float = NEAR) -> float:
    """Compare onnxruntime's vectors with gerund's, and return the largest cosine distance."""
    import onnxruntime

    def open_session() -> Any:
        return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    session = attempt(prepared.kind, "onnxruntime", open_session)

    def run(given: Mapping[str, np.ndarray]) -> np.ndarray:
        [vectors_BD] = session.run([VECTORS], dict(given))
        return np.asarray(vectors_BD)

    return compare(prepared, run, "onnxruntime", near)


# The name that optimum gives such a graph; the weights are in the file of the same name that ends in .bin.
OPENVINO_FILE = "openvino_model.xml"
OPENVINO_SETTINGS = "openvino.json"
_OPENVINO_NEEDS = ("openvino", "onnx", "onnxscript")
_REPORTER = "openvino_telemetry"
# Without it the runtime computes in bfloat16 or float16 wherever the processor has them.
_EXACTLY = {"INFERENCE_PRECISION_HINT": "f32"}


def write_openvino(runtime: EncoderRuntime, work: Path, folder: Path) -> Export:
    """Fill ``work`` with the graph, its tokenizer, ``openvino.json`` and a README, and verify the graph."""
    require_installed(_OPENVINO_NEEDS, "OpenVINO", "openvino")
    check_exportable(runtime, "OpenVINO")
    if runtime.head is not None and runtime.head.words is not None:
        raise ConfigError(
            "this encoder adds vectors of words, found by integers of 64 bits, which OpenVINO cuts to 32; "
            "export as onnx"
        )
    prepared = prepare(runtime, work)
    with TemporaryDirectory(dir=work) as temporary:
        graph = Path(temporary) / MODEL_FILE
        write_graph(prepared, graph)
        attempt(prepared.kind, "OpenVINO", lambda: translate(graph, work / OPENVINO_FILE))
    check_openvino(prepared, work / OPENVINO_FILE)
    prepared.tokenizer.save_pretrained(work)
    write_json(work / OPENVINO_SETTINGS, settings(prepared))
    text = readme(
        prepared,
        work,
        "A text encoder for OpenVINO, exported by gerund",
        "import openvino",
        f'model = openvino.Core().compile_model("{OPENVINO_FILE}", "CPU", {{"INFERENCE_PRECISION_HINT": "f32"}})',
        "vectors, states = model(...).values()",
        OPENVINO_SETTINGS,
    )
    note = (
        "\nWithout the hint, OpenVINO computes in bfloat16 or float16 where the processor has them: faster, and not "
        "quite the same vectors.\n"
    )
    (work / "README.md").write_text(text + note, encoding="utf-8")
    return Export(folder, f"openvino.Core().compile_model({str(folder / OPENVINO_FILE)!r}, 'CPU')")


def check_openvino(prepared: Prepared, path: Path) -> None:
    """Compare OpenVINO's vectors with gerund's."""
    model = attempt(prepared.kind, "OpenVINO", lambda: compiled(path))

    def run(given: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.asarray(model(dict(given))[VECTORS])

    compare(prepared, run, "OpenVINO")


def translate(source: Path, target: Path) -> None:
    """Convert an ONNX graph to OpenVINO's form, in float32."""
    openvino = _openvino()
    openvino.save_model(openvino.Core().read_model(str(source)), str(target), compress_to_fp16=False)


def compiled(path: Path) -> Any:
    """Return a compiled graph, which is called with its inputs by name and computes in float32."""
    return _openvino().Core().compile_model(str(path), "CPU", _EXACTLY)


def _openvino() -> Any:
    """Import OpenVINO without its telemetry."""
    if "openvino" in sys.modules or _REPORTER in sys.modules:
        return importlib.import_module("openvino")
    # None makes the import fail, and OpenVINO then does without.
    sys.modules[_REPORTER] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        del sys.modules[_REPORTER]
