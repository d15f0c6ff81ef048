"""``gerund infill``: fill the spans of a text on the terminal, or of many texts in a file."""

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.checks import one_of
from gerund.cli import options, text_io
from gerund.settings.encoder import INFILL_METHODS

if TYPE_CHECKING:
    from gerund.settings.model_spec import ModelSpec

_BLANK = "[blank]"


@options.takes(
    spec=options.model(
        "model",
        "adapter",
        *options.MACHINE,
        helps={"adapter": "PEFT folder, active while the model infills; none: without the model's own adapter."},
    ),
    sampling=options.sampling("temperature", "top_p", "top_k", "typical_p", "seed"),
)
def command(
    text: Annotated[
        str | None, typer.Argument(help="The text, with [blank] for each span; - reads it from standard input.")
    ] = None,
    file: options.Texts = None,
    column: options.Column = None,
    format: options.Format = None,
    blank: Annotated[str, typer.Option(help="Placeholder that marks a blank.")] = _BLANK,
    method: Annotated[
        str, typer.Option(help="infill, left-only, or a prompt: blank, contextual, prefix-suffix or line-by-line.")
    ] = "infill",
    max_tokens: Annotated[int, typer.Option(help="Longest span in tokens to try.")] = 32,
    length: Annotated[
        list[int] | None, typer.Option(help="Number of tokens to fill in; repeat to try several lengths.")
    ] = None,
    beams: Annotated[int, typer.Option(help="Width of the beam search.")] = 1,
    samples: Annotated[int, typer.Option(help="Sample this many fillings of each length and keep the best.")] = 1,
    shots: Annotated[int, typer.Option(help="Solved examples in a prompt, 0 to 5.")] = 0,
    *,
    sampling: dict[str, Any],
    spec: "ModelSpec",
    output: options.Lines = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Fill the spans of a text, or of every text of a file, using both sides of each.

    For one text the whole text is printed. With --file, --json or -o, prints one JSON object per text: text (with its
    spans filled), spans (their texts), scores (mean log-probability a token) and lengths (in tokens).

    The model tries several span lengths, up to --max-tokens; --length says which lengths to try instead. The
    method left-only reads only what comes before the span. The methods blank, contextual, prefix-suffix and
    line-by-line prompt the base model for the missing text.

    For example:

        gerund infill "The old man looked at [blank] and went home."

        gerund infill "She opened [blank], and [blank] was gone." --length 2 --length 4 --beams 4 --json

        gerund infill "It rained. ___ So we stayed in." --blank ___ --method line-by-line --shots 5 -m ./model

        gerund infill --file texts.jsonl -m ./model --temperature 0.8 --samples 4 --seed 1 -o filled.jsonl
    """
    one_of("way to infill", method, INFILL_METHODS)
    how = options.sampling_of(sampling)
    text_io.refuse_existing(output, force=force)
    text_io.require_text_or_file(text, file, "text", column=column, format=format)
    from gerund.inference.infill.infilling import BlankedText, planned

    chunks = text_io.read_texts(text, file, "text", column=column, format=format)
    for _ in text_io.each_text(chunks, partial(BlankedText.of, blank=blank)):
        pass
    settings: dict[str, Any] = {"blank": blank, "method": method, "max_tokens": max_tokens, "beams": beams}
    settings |= {"samples": samples, "shots": shots, "lengths": length or None}
    from gerund.entry import load_writer

    # A mistake in the settings is told before the model is loaded.
    planned(method, length or None, max_tokens, how, beams=beams, samples=samples, shots=shots)
    # How texts are encoded does not matter here: infilling has a plan of its own.
    lm = load_writer(spec)
    seeds = text_io.SeedsByText(how)

    def fill(text: str) -> dict[str, Any]:
        result = lm.infill(text, sampling=seeds.of_one(text), **settings)
        scores = [round(score, 6) for score in result.scores]
        return {"text": result.text, "spans": result.spans, "scores": scores, "lengths": result.lengths}

    infilled = text_io.each_text(chunks, fill)
    if file is None and output is None and not as_json:
        typer.echo(next(infilled)["text"])
        return
    text_io.write(text_io.as_lines(infilled), output, sum(map(len, chunks)), "infilling")
