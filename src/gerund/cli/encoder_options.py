"""Options that say how a model is read as an encoder, for the commands that write one."""

from pathlib import Path
from typing import Annotated

import typer

from gerund import config

DEFAULT_MODEL = config.DEFAULT_MODEL

Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL", help=f"A folder or hub id; {DEFAULT_MODEL} for the embedded default.", show_default=False
    ),
]
Output = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)]
Attention = Annotated[
    str | None,
    typer.Option(help="Attention plan, such as mask0-bidir; left out, the model's own.", show_default=False),
]
K = Annotated[int | None, typer.Option("--k", help="How many layers the plan converts.", show_default=False)]
K0 = Annotated[
    int | None, typer.Option("--k0", help="For mask0+bidir: how many hide the first token.", show_default=False)
]
SinkTokens = Annotated[int | None, typer.Option(help="How many first tokens a mask0 plan hides.", show_default=False)]
Pooling = Annotated[str | None, typer.Option(help="mean, weighted-mean, last or first.", show_default=False)]
Prompt = Annotated[str | None, typer.Option(help="Put before every text, and not pooled.", show_default=False)]
MaxLength = Annotated[int | None, typer.Option(help="Longest text in tokens.", show_default=False)]
Adapter = Annotated[
    Path | None,
    typer.Option(
        help="A PEFT folder, asleep while the model writes; none leaves the model's own aside.", show_default=False
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.")]
Json = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]


def model_name(model: str) -> str | None:
    """Return what ``gerund.load`` takes: None for the embedded default."""
    return None if model == DEFAULT_MODEL else model
