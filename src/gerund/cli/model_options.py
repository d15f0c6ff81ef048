"""Options that say which model and how it is read, and what they make: a ``ModelSpec``.

Knows: each option's name and help. Does not know: what a command does with the model.
"""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from gerund.poolings import POOLINGS
from gerund.settings import encoder as config

DEFAULT_MODEL = config.DEFAULT_MODEL

Output = Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.", show_default=False)]
Sample = Annotated[
    Path | None, typer.Option(help="A file of texts, one a line, to fit transforms on.", show_default=False)
]
Force = Annotated[bool, typer.Option("--force", help="Replace OUT.")]
Json = Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")]

OPTIONS: dict[str, Any] = {
    "MODEL": Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"A folder, GGUF file, short name (see gerund models) or hub id; {DEFAULT_MODEL}: the bundled model.",
            show_default=False,
        ),
    ],
    "model": Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="A folder, GGUF file, short name (see gerund models) or hub id; left out, the bundled model.",
            show_default=False,
        ),
    ],
    "attention": Annotated[
        str | None,
        typer.Option(help="Attention plan, such as mask0-bidir; left out, the model's own.", show_default=False),
    ],
    "k": Annotated[int | None, typer.Option("--k", help="How many layers the plan converts.", show_default=False)],
    "k0": Annotated[
        int | None,
        typer.Option(
            "--k0", help="For mask0+bidir: how many of the k layers hide the first token.", show_default=False
        ),
    ],
    "sink_tokens": Annotated[
        int | None, typer.Option(help="How many first tokens a mask0 plan hides.", show_default=False)
    ],
    "combine": Annotated[
        str | None,
        typer.Option(help="How inter and extra plans join their two outputs: sum or mean.", show_default=False),
    ],
    "variant": Annotated[
        str | None,
        typer.Option(
            help="Layout of an inter plan or of skips: paper, or released as in its code.", show_default=False
        ),
    ],
    "skips": Annotated[
        int | None,
        typer.Option(help="Residual connections across this many layers; 0 for none.", show_default=False),
    ],
    "recurrent": Annotated[
        str | None,
        typer.Option(
            help="How converted layers without attention read: causal (forwards) or both (forwards and backwards).",
            show_default=False,
        ),
    ],
    "pooling": Annotated[str | None, typer.Option(help=f"{', '.join(POOLINGS)}.", show_default=False)],
    "prompt": Annotated[str | None, typer.Option(help="Put before every text, and not pooled.", show_default=False)],
    "pool_prompt": Annotated[
        bool | None,
        typer.Option("--pool-prompt/--no-pool-prompt", help="Pool the prompt's tokens as well.", show_default=False),
    ],
    "normalize": Annotated[
        bool | None,
        typer.Option("--normalize/--no-normalize", help="Give every vector length 1.", show_default=False),
    ],
    "append_eos": Annotated[
        bool | None,
        typer.Option("--append-eos/--no-append-eos", help="Put an end token after every text.", show_default=False),
    ],
    "max_length": Annotated[int | None, typer.Option(help="Longest text in tokens.", show_default=False)],
    "adapter": Annotated[
        str | None,
        typer.Option(
            help="A PEFT folder, inactive while the model generates; none: without the model's own adapter.",
            show_default=False,
        ),
    ],
    "template": Annotated[
        str | None,
        typer.Option(
            help="What is put around a text: prompteol, metaeol, ..., or a text with {text}.", show_default=False
        ),
    ],
    "layers": Annotated[
        str | None,
        typer.Option(help="Average the states of these layers: all, 6, 4-8 or 1+8.", show_default=False),
    ],
    "prepend": Annotated[
        int | None, typer.Option(help="Token Prepending below this layer, into a template.", show_default=False)
    ],
    "reroute": Annotated[
        str | None,
        typer.Option(
            help="KV-Embedding: put the last token's key and value before the text in these layers: 6, 4-8, all.",
            show_default=False,
        ),
    ],
    "transform": Annotated[
        str | None,
        typer.Option(
            help="Fit whitening or all-but-the-top to the vectors of --sample, or truncate-128: the first 128 numbers.",
            show_default=False,
        ),
    ],
    "pool_bos": Annotated[
        str | None,
        typer.Option(
            help="Pool the special tokens before a text without a prompt: always, never, auto.", show_default=False
        ),
    ],
    "text_normalization": Annotated[
        str | None,
        typer.Option(
            help="Normalize texts before they are encoded: nfkc, or none to encode them as they are.",
            show_default=False,
        ),
    ],
    "sample": Sample,
    "infill_adapter": Annotated[
        str | None,
        typer.Option(
            help="Infill with another adapter: a PEFT folder, or a model trained from the same weights; none for "
            "the untouched model.",
            show_default=False,
        ),
    ],
    "scorer": Annotated[
        str | None,
        typer.Option(
            help="Score continuations as this model does, which was trained from the same weights.",
            show_default=False,
        ),
    ],
    "dtype": Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16; int8 encodes in 8 bits (CPU).")],
    "device": Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, ...")],
}
"""By the names of :class:`gerund.settings.model_spec.ModelSpec`'s fields; ``MODEL`` is the model as an argument."""
PLAN = ("attention", "k", "k0", "sink_tokens", "combine", "variant", "skips", "recurrent")
METHODS = (*config.METHODS, "sample")
ENCODER = (
    *(*PLAN, "pooling", "prompt", "pool_prompt", "append_eos", "normalize"),
    *(*METHODS, "max_length", "adapter"),
)
MACHINE = ("dtype", "device")


def with_spec(
    *fields: str, helps: Mapping[str, str] | None = None, **defaults: str | None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each of ``fields`` and hand it what they make, as its argument ``spec``.

    The options stand in the help where ``spec`` stands among the command's parameters; the argument ``MODEL`` stands
    first.

    Args:
        fields: names in ``OPTIONS``; ``MODEL`` for an argument that names the model, instead of the option ``model``.
            Without either, the command says itself which models are meant, and the spec is how each of them is read.
        helps: other help texts than the table's, where an option means less in this command.
        defaults: other defaults than ``None`` (``auto`` for type and device, and no default for ``MODEL``).
    """
    usual = {"dtype": "auto", "device": "auto", "MODEL": inspect.Parameter.empty}

    def parameter_of(name: str) -> inspect.Parameter:
        default = {**usual, **defaults}.get(name)
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(name.lower(), kind, default=default, annotation=_annotation(name, helps or {}))

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(function).parameters.values()
        parameters = [parameter_of("MODEL")] if "MODEL" in fields else []
        for parameter in own:
            if parameter.name == "spec":
                parameters += [parameter_of(name) for name in fields if name != "MODEL"]
            else:
                parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @wraps(function)
        def command(**given: Any) -> None:
            from gerund.settings.model_spec import ModelSpec

            settings = {name.lower(): given.pop(name.lower()) for name in fields}
            function(**given, spec=ModelSpec.of(settings.pop("model", None), **settings))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
        return command

    return decorate


def _annotation(name: str, helps: Mapping[str, str]) -> Any:
    """Return an option of the table, with another help text where there is one."""
    if name not in helps:
        return OPTIONS[name]
    kind, option = get_args(OPTIONS[name])
    own = copy(option)
    own.help = helps[name]
    return Annotated[kind, own]
