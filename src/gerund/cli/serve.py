"""``gerund serve``: one model behind OpenAI's interface, Cohere's rerank and infilling."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gerund.cli import options

if TYPE_CHECKING:
    from gerund.server.config import ServerConfig
    from gerund.settings.model_spec import ModelSpec


def _option(help_: str, *names: str) -> Any:
    return typer.Option(*names, help=help_, show_default=False)


@options.takes(spec=options.model("MODEL", *options.ENCODER, "infill_adapter", "scorer", *options.MACHINE, MODEL=None))
def command(
    *,
    host: Annotated[
        str | None, _option("Address to listen on; others than this machine's own need a key. [default: 127.0.0.1]")
    ] = None,
    port: Annotated[int | None, _option("Port to listen on; 0 for a free one. [default: 8000]")] = None,
    config: Annotated[
        Path | None, _option("A YAML file with these options by name; what is typed wins.", "--config", "-c")
    ] = None,
    api_key_file: Annotated[
        Path | None, _option("A file with one key a line. Or put one key into GERUND_API_KEY.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        _option("Answer to this host name too, such as a reverse proxy's; repeatable. [default: this machine's names]"),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        _option(
            "Let pages of this origin read answers in a browser (CORS), such as http://localhost:5173; repeatable."
        ),
    ] = None,
    name: Annotated[
        list[str] | None, _option("What clients call the model; repeated, the first is listed. [default: MODEL's]")
    ] = None,
    index: Annotated[str | None, _option("An index of documents to search with this model; see gerund index.")] = None,
    workers: Annotated[
        int | None, _option("Processes behind the one port, each with a copy of the model. [default: 1]")
    ] = None,
    threads: Annotated[int | None, _option("Threads that a worker computes in.")] = None,
    max_new_tokens: Annotated[
        int | None, _option("Tokens of an answer in a chat whose request does not say. [default: 1024]")
    ] = None,
    timeout: Annotated[
        float | None, _option("Seconds that a request may take, waiting included. [default: 120]")
    ] = None,
    drain: Annotated[
        float | None, _option("Seconds to finish what runs when the server is asked to end. [default: 30]")
    ] = None,
    slots: Annotated[int | None, _option("Texts that are written at a time. [default: 8]")] = None,
    context: Annotated[
        int | None, _option("Tokens of a slot, prompt and text. [default: the model's context, at most 2048]")
    ] = None,
    read_tokens: Annotated[
        int | None, _option("Tokens that are read between two steps of writing. [default: 256]")
    ] = None,
    writing_ratio: Annotated[
        float | None, _option("Seconds of writing for each second of reading, while both wait. [default: 1]")
    ] = None,
    queue_tokens: Annotated[
        int | None, _option("Tokens that may wait; beyond, clients are told to come again. [default: 65536]")
    ] = None,
    exact: Annotated[
        bool, _option("Write one text at a time, bit-equal to gerund generate on every machine.", "--exact")
    ] = False,
    compile: Annotated[
        bool,
        _option(
            "Compile the decode step: writing is faster, the start takes a minute or two, and more memory is used.",
            "--compile",
        ),
    ] = False,
    reproducible: Annotated[
        bool | None,
        _option(
            "A text does not depend on what else is written (the default); without, few clients are served faster.",
            "--reproducible/--no-reproducible",
        ),
    ] = None,
    body_limit: Annotated[int | None, _option("Bytes that a request has at most. [default: 8388608]")] = None,
    body_timeout: Annotated[float | None, _option("Seconds in which it has to have come. [default: 30]")] = None,
    log: Annotated[
        str | None, _option("text, json or none: a line a request, without its texts. [default: text]")
    ] = None,
    spec: "ModelSpec",
) -> None:
    """Serve one model to many clients: chat, completions, embeddings, rerank, scores and infilling.

    Clients for OpenAI's interface take http://127.0.0.1:8000/v1 as their base URL, those for Cohere's rerank
    http://127.0.0.1:8000. Ctrl-C or SIGTERM ends the server; what runs is finished first.

    For example:

        gerund serve

        gerund serve ./chat-model --port 8080 --name my-model

        GERUND_API_KEY=secret gerund serve ./model --host 0.0.0.0 --workers 4

        gerund serve --config serve.yaml
    """
    from gerund.server.config import read_config, read_keys, settings_of

    typed = {
        "host": host, "port": port, "api_key_file": None if api_key_file is None else str(api_key_file),
        "allowed_host": allowed_host or None, "cors_origin": cors_origin or None,
        "name": name or None, "index": index, "workers": workers, "threads": threads, "max_new_tokens": max_new_tokens,
        "timeout": timeout, "drain": drain, "slots": slots, "context": context, "read_tokens": read_tokens,
        "writing_ratio": writing_ratio, "queue_tokens": queue_tokens, "exact": exact or None,
        "compile": compile or None, "reproducible": reproducible,
        "body_limit": body_limit, "body_timeout": body_timeout, "log": log,
    }  # fmt: skip
    of_model, of_server = ({}, {}) if config is None else read_config(config)
    settings = settings_of({**of_server, **{key: value for key, value in typed.items() if value is not None}})
    if config is not None:
        spec = _with_file(spec, of_model)
    keys = read_keys(settings)
    settings.demand_safe(keys)
    _demand_libraries()
    if settings.index is not None:
        spec = _with_index(spec, settings.index)
    _demand_place(spec)
    _serve(spec, settings, keys)


def _with_file(spec: "ModelSpec", of_model: dict[str, Any]) -> "ModelSpec":
    """Return what was typed of the model, and for the rest what the file says."""
    from gerund.settings.model_spec import ModelSpec

    # The options for type and device have a default that says nothing.
    typed = {
        key: value
        for key, value in spec.model_dump(exclude_none=True).items()
        if (key, value) not in (("dtype", "auto"), ("device", "auto"), ("model", "default"))
    }
    both = {**of_model, **typed}
    return ModelSpec.of(both.pop("model", None), **both)


def _with_index(spec: "ModelSpec", where: str) -> "ModelSpec":
    """Return the spec of the model that an index was made with, where none is named."""
    from gerund.cli.index_view import own_model
    from gerund.retrieval.index import demand_index, store_at

    named = "model" in spec.model_fields_set
    demand_index(where, opened=not named)
    about = None if named else store_at(where).about()
    if about is None or about.spec is None:
        return spec
    return own_model(about, where, spec) or about.model_spec(where)


def _demand_place(spec: "ModelSpec") -> None:
    """Say before a port is opened that a model is not there."""
    from gerund.models.sources import find

    find(spec.model).demand_reachable()


def _demand_libraries() -> None:
    from importlib.util import find_spec

    from gerund.errors import MissingDependencyError

    missing = [one for one in ("fastapi", "uvicorn", "prometheus_client") if find_spec(one) is None]
    if missing:
        raise MissingDependencyError(f"the server needs {' and '.join(missing)}: pip install 'gerund[serve]'")


def _serve(spec: "ModelSpec", settings: "ServerConfig", keys: list[str]) -> None:
    from gerund.server import logs
    from gerund.server.connections import address_of, listen

    logs.set_up(settings.log)
    with listen(settings.host, settings.port) as listening:
        where = address_of(listening)
        compiling = ", then compiling its step, which may take a minute" if settings.compile else ""
        typer.echo(f"gerund: listening on {where}; loading the model{compiling} ...")

        def announce(card: dict[str, Any]) -> None:
            typer.echo(welcome(where, card, has_key=bool(keys), workers=settings.workers))

        if settings.workers == 1:
            from gerund.server.running import serve

            serve(listening, spec, settings, keys, lambda service: announce(service.card()))
        else:
            from gerund.server.workers import serve_many

            serve_many(listening, spec, settings, keys, announce)
    typer.echo("gerund: ended")
    if settings.workers == 1:
        from gerund.server.running import end_while_loading

        end_while_loading()


def welcome(where: str, card: dict[str, Any], *, has_key: bool, workers: int) -> str:
    """Return what is said when the server is ready: what is served, what each route needs, and a line to try.

    Args:
        where: the address.
        card: what the server says of its model.
        has_key: whether requests need a key.
        workers: how many processes there are.
    """
    from importlib.util import find_spec

    name = card["id"]
    chat = "" if card["chat"] else "; answers 400, since this model has no chat template"
    forms = "" if find_spec("llguidance") else "; response_format needs pip install 'gerund[structured]'"
    judge = "the model's own scorer" if card["scorer"] == "own" else "the model's likelihoods"
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    body = f'{{"model": "{name}", "input": "The old man looked at the sea."}}'
    return "\n".join([
        f"gerund: ready: {name} at {where}, {workers} worker{'s' if workers > 1 else ''}, fingerprint "
        f"{card['fingerprint']}",
        f"  promise: {card['promise']} ({card['why']})",
        f"  /v1/chat/completions  conversations, streams{chat}{forms}",
        f"  /v1/completions       texts, streams; with suffix a gap; best_of by {judge}",
        f"  /v1/embeddings        {card['dimensions']} dimensions, or fewer",
        "  /v1/rerank /v2/rerank /rerank /v1/score /infill /tokenize /detokenize",
        "  /v1/models /health /metrics /v1/attention /v1/search (with --index)",
        f"  {where}/ is a page to try all of it in a browser",
        f"  key: {'needed on every route' if has_key else 'none; this machine alone may ask'}",
        "Try:",
        f"  curl {where}/v1/embeddings -H 'Content-Type: application/json'{key} -d '{body}'",
    ])  # fmt: skip
