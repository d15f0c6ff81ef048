"""``gerund inspect``: plot the attention of a model's layers, before and after its conversion."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options, text_io
from gerund.cli.text_io import tell
from gerund.errors import ConfigError, DataError, OutputExistsError, TextError

if TYPE_CHECKING:
    from gerund.inference.inspection import AttentionInspection
    from gerund.language_model import LanguageModel
    from gerund.settings.model_spec import ModelSpec


@options.takes(spec=options.model("MODEL", *options.PLAN, "adapter", *options.MACHINE))
def command(
    text: Annotated[str | None, typer.Argument(help="The text. [default: eight bundled sentences]")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="OUT.png, OUT.svg or OUT.pdf.")] = None,
    file: options.Texts = None,
    column: options.Column = None,
    format: options.Format = None,
    limit: Annotated[int, typer.Option(help="Take only this many texts, the first of the file.")] = 64,
    *,
    spec: "ModelSpec",
    layers: Annotated[
        str | None, typer.Option(help="Layers whose maps are drawn, such as 0,3,8-11. [default: up to twelve]")
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Draw every layer's mean attention map, before and after the conversion.

    Below each map is the fraction of attention that goes to the first token. Where that is most of it, the layer has
    an attention sink, and a mask0 plan is likely to give better vectors.

    For example:

        gerund inspect ./model "The cat sat on the mat." -o attention.png

        gerund inspect ./model -f sentences.txt -o attention.png --attention mask0+bidir --k 18 --k0 10

        gerund inspect default --layers 0,2-4 -o attention.svg --json
    """
    if text is None and any(char.isspace() for char in spec.model) and not Path(spec.model).expanduser().exists():
        raise ConfigError(
            f"MODEL comes first, and {spec.model!r} is none; {options.DEFAULT_MODEL} is the bundled model"
        )
    if output is None and not as_json:
        raise ConfigError("give -o OUT.png for a picture, or --json for the numbers")
    if limit < 1:
        raise ConfigError(f"--limit {limit} leaves no text")
    kind = _check_output(output, force) if output is not None else ""
    texts = _texts(text, file, column, format, limit)
    import gerund
    from gerund.models.architectures import demand_decoder_only

    lm = gerund.load(spec)
    demand_decoder_only(lm.model, "be looked into: no attention plan applies to it")
    shown = _layers(layers, lm.n_layers)
    from gerund.inference.inspection import LONGEST, inspect_attention

    inspected = inspect_attention(lm.runtime, texts)
    if inspected.cut:
        longest = min(LONGEST, lm.max_length or LONGEST)
        tell(f"{inspected.cut} of {len(texts)} texts were cut at {longest} tokens")
    if note := _of_another_plan(lm):
        tell(f"{note}")
    if output is not None:
        _draw(lm, inspected, shown, output, kind)
    if as_json:
        typer.echo(json.dumps(_report(lm, inspected, output), indent=2, ensure_ascii=False))
    else:
        typer.echo(output)


def _of_another_plan(lm: "LanguageModel") -> str:
    """Return a sentence where the maps are of an adapter under another plan than it was trained under, else ""."""
    from gerund.evaluation.systems.language_model import adapter_facts
    from gerund.reporting.comparison import trained_under

    facts = adapter_facts(lm)
    plan = lm.encoder.with_defaults(lm.n_layers).attention
    if facts.get("adapter_plan", plan.to_dict()) == plan.to_dict():
        return ""
    return f"{trained_under(facts)}, and is read under another plan; --adapter none leaves it out"


def _check_output(output: Path, force: bool) -> str:
    """Find what is wrong with the output before the model is loaded; return the picture's format."""
    from gerund.reporting.plots.style import FORMATS, require_matplotlib

    kind = output.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise ConfigError(f"{output}: the name of a picture ends in {', '.join(f'.{name}' for name in FORMATS)}")
    if output.is_dir() or (output.exists() and not force):
        raise OutputExistsError(f"{output} exists already; choose another name or give --force to replace it")
    require_matplotlib()
    return kind


def _texts(text: str | None, file: str | None, column: str | None, format: str | None, limit: int) -> list[str]:
    if text is not None and file is not None:
        raise ConfigError("give either a text or --file, not both")
    text_io.require_file(file, column=column, format=format)
    if file is not None:
        from gerund.data.tables import open_table, read_rows

        table = open_table(file, format=format, column=column)
        texts: list[str] = []
        for rows in read_rows(table, max_rows=limit):
            texts += rows.without(rows.empty()).texts
            if len(texts) >= limit:
                break
        if not texts:
            raise DataError(f"{table.name} has no texts")
        return texts[:limit]
    if text is None:
        from gerund.inference.inspection import EXAMPLE_TEXTS

        return list(EXAMPLE_TEXTS)
    if not text.strip():
        raise TextError("the text is empty; give some words to look at")
    return [text]


def _layers(spec: str | None, n_layers: int) -> list[int] | None:
    """Read ``0,3,8-11``."""
    if spec is None:
        return None
    layers: list[int] = []
    for part in spec.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"--layers {spec}: {part.strip()!r} is neither a layer nor a range such as 8-11")
        span = range(int(first), int(last if dash else first) + 1)
        if not span or span[-1] >= n_layers:
            raise ConfigError(f"--layers {spec}: the model has layers 0 to {n_layers - 1}")
        layers += [layer for layer in span if layer not in layers]
    return layers


def _draw(
    lm: "LanguageModel", inspection: "AttentionInspection", shown: list[int] | None, output: Path, kind: str
) -> None:
    from gerund.inference.inspection import token_labels
    from gerund.jobs.files import atomic_file
    from gerund.reporting.plots.attention import attention_figure
    from gerund.reporting.plots.style import picture

    title = f"{Path(lm.name).name}, {lm.encoder.plan_label(lm.n_layers)}, {lm.n_layers} layers"
    if len(inspection.ids) > 1:
        title += f"; mean of {len(inspection.ids)} texts"
    figure = attention_figure(
        inspection.before, inspection.after, title=title, even=inspection.even, layers=shown,
        labels=token_labels(lm.tokenizer, inspection.ids[0]) if len(inspection.ids) == 1 else None,
    )  # fmt: skip
    data = picture(figure, kind)
    output.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(output) as sink:
        sink.write(data)


def _report(lm: "LanguageModel", inspection: "AttentionInspection", output: Path | None) -> dict[str, Any]:
    from gerund.inference.inspection import sink_fraction

    fractions = zip(sink_fraction(inspection.after), inspection.after, strict=True)
    first = sink_fraction(inspection.before)
    return {
        "model": lm.name,
        "architecture": lm.model.config.model_type,
        "attention": lm.encoder.with_defaults(lm.n_layers).attention.to_dict(),
        "texts": len(inspection.ids),
        "tokens": sum(map(len, inspection.ids)),
        "picture": None if output is None else str(output),
        "even_fraction": round(inspection.even, 6),
        "layers": [
            {
                "layer": item.layer,
                "run": item.run,
                "view": str(item.view),
                "sink_fraction_before": None if item.run else round(first[item.layer], 6),
                "sink_fraction_after": round(fraction, 6),
            }
            for fraction, item in fractions
        ],
    }
