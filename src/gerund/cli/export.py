"""``gerund export``: write an encoder for other tools."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from gerund.checks import one_of
from gerund.cli import options
from gerund.cli.convert import warn_of_merging
from gerund.errors import ConfigError
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
        str, typer.Option(help="sentence-transformers, merged, onnx, onnx-int8, openvino, gguf or gguf-q8_0.")
    ],
    spec: "ModelSpec",
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Write an encoder for other tools, in the checkpoint's own type unless --dtype says another.

    sentence-transformers: a folder for that library. Plain SentenceTransformer("OUT") reads causal and wholly
    bidirectional encoders; it is tried, and compared with gerund, before the folder is put in place. Other plans
    need gerund.integrations.sentence_transformers.load("OUT"). README.md in the folder says which it is.

    merged: a plain model with the encoder's adapter merged into its weights, for tools that know no adapters. It is
    loaded again, and its vectors and logits are compared, before the folder is put in place.

    onnx: model.onnx, from token ids to vectors in float32, with the attention plan baked in, its tokenizer, and
    a README.md with ten lines of Python that need only onnxruntime and tokenizers. Its vectors
    are compared with those of gerund before the folder is put in place. It needs the extra onnx.

    onnx-int8: the same with weights in 8 bits: a quarter of the size, and quicker on a processor. README.md has the
    smallest cosine to gerund's vectors.

    openvino: the graph of onnx as openvino_model.xml and .bin, for OpenVINO, tried and compared as well. It needs the
    extra openvino.

    gguf: the untouched language model as model.gguf, for llama.cpp: it generates there, and no plan or adapter takes
    part. llama.cpp continues a few texts by it, and its probabilities are compared with gerund's, before the folder
    is put in place. For Llama, Mistral, Qwen 2 and Qwen 3. It needs the extra gguf.

    gguf-q8_0: the same with weights in 8 bits.

    For example:

        gerund export ./encoder ./exported --format sentence-transformers

        gerund export ./model ./exported --format sentence-transformers --attention bidir --max-length 512

        gerund export ./model ./merged --format merged --adapter ./lora

        gerund export ./encoder ./graph --format onnx

        gerund export ./model ./llama --format gguf
    """
    from gerund.exporting import added_formats

    one_of("format", format, [*EXPORT_FORMATS, *added_formats()])
    from gerund.entry import load
    from gerund.jobs.files import require_new_folder
    from gerund.models.loading import own_dtype
    from gerund.models.sources import find

    require_new_folder(output, overwrite=force)
    if spec.dtype == "int8":
        raise ConfigError("weights are written in 8 bits by --format onnx-int8 or gguf-q8_0; leave --dtype out")
    lm = load(spec, dtype=own_dtype(find(spec.model)) if spec.dtype == "auto" else None)
    done = lm.export(output, format, overwrite=force)  # type: ignore[arg-type]
    if format == "merged":
        warn_of_merging(lm)
    if as_json:
        typer.echo(json.dumps({"folder": str(output), "format": format, "load": done.load, "why": done.why_custom}))
        return
    typer.echo(f"{output}: {format}")
    if done.why_custom:
        typer.echo(f"plain sentence-transformers cannot read it: {done.why_custom}")
    typer.echo(f"load it with: {done.load}")
