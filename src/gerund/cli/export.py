"""``gerund export``: export an encoder to sentence-transformers, ONNX, OpenVINO or GGUF, or merge its adapter."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from gerund.checks import one_of
from gerund.cli import options
from gerund.cli.convert import warn_of_merging
from gerund.settings.encoder import EXPORT_FORMATS

if TYPE_CHECKING:
    from gerund.settings.model_spec import ModelSpec


@options.takes(
    spec=options.model(
        "MODEL",
        *options.ENCODER,
        "dtype",
        helps={"dtype": "Type of the weights: auto, the checkpoint's own; float32, bfloat16 or float16."},
    )
)
def command(
    output: options.Output,
    format: Annotated[
        str,
        typer.Option(
            help="sentence-transformers, multi-vector, merged, onnx, onnx-int8, openvino, gguf or gguf-embedding."
        ),
    ],
    spec: "ModelSpec",
    type: Annotated[
        str | None,
        typer.Option(
            help="Type of the weights in a GGUF file: f32, bf16, f16, q8_0, q6_k, q5_k_m, q4_k_m or q4_0. "
            "[default: the checkpoint's own]"
        ),
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Write an encoder for other tools, in the checkpoint's own type unless --dtype says another.

    sentence-transformers: a folder for that library. Plain SentenceTransformer("OUT") reads causal and wholly
    bidirectional encoders; it is tried, and compared with gerund, before the folder is put in place. Other plans
    need gerund.integrations.sentence_transformers.load("OUT"). README.md in the folder says which it is.

    multi-vector: a folder for sentence-transformers' MultiVectorEncoder, of trained token vectors (late interaction).
    Its scores are compared with gerund's before the folder is put in place.

    merged: a plain model with the encoder's adapter merged into its weights, for tools that know no adapters. It is
    loaded again, and its vectors and logits are compared, before the folder is put in place.

    onnx: model.onnx, from token ids to vectors in float32, with the attention plan baked in, its tokenizer, and
    a README.md with ten lines of Python that need only onnxruntime and tokenizers. Its vectors
    are compared with those of gerund before the folder is put in place. It needs the extra onnx.

    onnx-int8: the same with weights in 8 bits: a quarter of the size, and quicker on a processor. README.md has the
    smallest cosine to gerund's vectors.

    openvino: the graph of onnx as openvino_model.xml and .bin, for OpenVINO, tried and compared as well. It needs the
    extra openvino.

    gguf: the base language model as model.gguf, for llama.cpp, Ollama and LM Studio: it generates there, and no plan or
    adapter is used. For Llama, Mistral, Qwen 2 and Qwen 3. It needs the extra gguf.

    gguf-embedding: the encoder for llama.cpp, with its adapter merged and its pooling in the file. For the plans causal
    and bidir with the poolings mean, first and last.

    Both take --type, which quantizes the weights as llama.cpp's llama-quantize does. gerund and llama.cpp then open the
    file, and their results are compared, before the folder is put in place. The command reports the size, and how far
    the file is from the original.

    For example:

        gerund export ./encoder ./exported --format sentence-transformers

        gerund export ./model ./exported --format sentence-transformers --attention bidir --max-length 512

        gerund export ./model ./merged --format merged --adapter ./lora

        gerund export ./encoder ./graph --format onnx

        gerund export ./model ./llama --format gguf --type q4_k_m

        gerund export ./encoder ./llama --format gguf-embedding --type q8_0
    """
    from gerund.exporting import added_formats

    one_of("format", format, [*EXPORT_FORMATS, *added_formats()])
    from gerund.entry import load
    from gerund.exporting.formats import check_type
    from gerund.jobs.files import require_new_folder
    from gerund.models.loading import own_dtype
    from gerund.models.sources import find

    check_type(format, type)
    require_new_folder(output, overwrite=force)
    lm = load(spec, dtype=own_dtype(find(spec.model)) if spec.dtype == "auto" else None)
    done = lm.export(output, format, type=type, overwrite=force)  # type: ignore[arg-type]
    if format == "merged":
        warn_of_merging(lm)
    if as_json:
        report = {"folder": str(output), "format": format, "load": done.load, "why": done.why_custom}
        typer.echo(json.dumps({**report, "about": done.about}))
        return
    typer.echo(f"{output}: {format}" + (f", {done.about}" if done.about else ""))
    if done.why_custom:
        typer.echo(f"plain sentence-transformers cannot read it: {done.why_custom}")
    typer.echo(f"load it with: {done.load}")
