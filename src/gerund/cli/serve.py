"""``gerund serve``: serve one model over HTTP, with the APIs of OpenAI and Ollama, Cohere's rerank and infilling."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from gerund.cli import options
from gerund.cli.search import own_model
from gerund.errors import MissingDependencyError
from gerund.server.config import ServerConfig, read_config, read_keys, settings_of
from gerund.settings.model_spec import ModelSpec

# Left out unless typed, so that a file may say it.
_UNSAID: dict[str, Any] = dict.fromkeys(("MODEL", *options.MACHINE))


def _server_options() -> options.Group:
    """Return an option for each setting of the server; the command gets those that were typed."""
    made, flags = [], []
    for name, field in ServerConfig.model_fields.items():
        kind, help_ = options.cli_type(field.annotation), (field.description or "").replace("``", "")
        if field.default is False:
            flags.append(name)
            made.append(options.option(name, bool, help_, f"--{name.replace('_', '-')}", default=False))
            continue
        if field.default not in (None, ()) and field.default is not True:
            help_ += f" [default: {field.default}]"
        kind = list[kind] if field.default == () else kind  # type: ignore[valid-type]
        made.append(options.option(name, kind | None, help_))

    def typed(values: dict[str, Any]) -> dict[str, Any]:
        return {
            name: value for name, value in values.items() if value not in (None, []) and (value or name not in flags)
        }

    return options.Group(made, typed)


@options.takes(
    spec=options.model(
        *("MODEL", *options.ENCODER, "infill_adapter", "scorer", "reranker", *options.MACHINE), **_UNSAID
    ),
    typed=_server_options(),
)
def command(
    *,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="A YAML file with these options by name; what is typed wins.")
    ] = None,
    typed: dict[str, Any],
    spec: "ModelSpec",
) -> None:
    """Serve one model to many clients: chat, completions, embeddings, rerank, scores and infilling.

    Clients for OpenAI's interface take http://127.0.0.1:8000/v1 as their base URL, those for Cohere's rerank
    http://127.0.0.1:8000. Ctrl-C or SIGTERM ends the server; what runs is finished first.

    For example:

        gerund serve

        gerund serve ./chat-model --port 8080 --name my-model

        GERUND_API_KEY=secret gerund serve ./model --host 0.0.0.0 --workers 4

        gerund serve ./chat-model --encoder st:sentence-transformers/all-MiniLM-L6-v2

        gerund serve --config serve.yaml
    """
    of_model, of_server = ({}, {}) if config is None else read_config(config)
    settings = settings_of({**of_server, **typed})
    start(spec if config is None else _with_file(spec, of_model), settings)


def start(spec: "ModelSpec", settings: "ServerConfig") -> None:
    """Check what a server needs, and run it until a signal ends it."""
    from gerund.models.sources import SENTENCE_TRANSFORMERS, find

    keys = read_keys(settings.api_key_file)
    settings.check_keys(keys)
    _require_libraries(mcp=settings.mcp)
    if settings.encoder is not None and not settings.encoder.startswith(SENTENCE_TRANSFORMERS):
        find(settings.encoder).demand_reachable()
    if settings.index is not None:
        spec = _with_index(spec, settings.index, settings)
    find(spec.model).demand_reachable()  # before a port is opened
    _serve(spec, settings, keys)


def _with_file(spec: "ModelSpec", of_model: dict[str, Any]) -> "ModelSpec":
    """Return what was typed of the model, and for the rest what the file says."""
    typed = spec.model_dump(exclude_unset=True, exclude_none=True)
    model = typed.pop("model", None)
    given = ModelSpec.of(**of_model)
    # A plan that is typed replaces the whole plan of the file; settings without a plan there belong to the one typed.
    both = ModelSpec.of(given, **typed) if given.attention is not None else ModelSpec.of(**{**of_model, **typed})
    return both if model is None else both.model_copy(update={"model": model})


def _with_index(spec: "ModelSpec", where: str, settings: "ServerConfig") -> "ModelSpec":
    """Return the spec of the model that an index was made with, where none is named.

    An index of another model is refused before the model is loaded, where files tell, except with several workers, each
    of which opens it by itself.
    """
    from gerund.retrieval.index import demand_index
    from gerund.retrieval.model_check import refuse_other_dimensions

    named, alone = settings.encoder is not None or "model" in spec.model_fields_set, settings.workers == 1
    about = demand_index(where, opened=alone or not named)
    if about is None:
        return spec
    if not named and about.spec is not None:
        spec = own_model(about, where, spec) or about.model_spec(where)
    if alone:
        refuse_other_dimensions(about, where, settings.encoder or spec)
    return spec


def _require_libraries(*, mcp: bool) -> None:
    if mcp:
        import gerund.integrations.mcp  # noqa: F401 - raises an error if the SDK is missing
    missing = [library for library in ("fastapi", "uvicorn", "prometheus_client") if find_spec(library) is None]
    if missing:
        raise MissingDependencyError(f"the server needs {' and '.join(missing)}: pip install 'gerund[serve]'")


def _serve(spec: "ModelSpec", settings: "ServerConfig", keys: list[str]) -> None:
    from gerund.server import logs
    from gerund.server.connections import address_of, listen

    logs.set_up(settings.log)
    with listen(settings.host, settings.port) as listening:
        where = address_of(listening)
        typer.echo(f"gerund: listening on {where}; loading the model ...")

        def announce(card: dict[str, Any]) -> None:
            has = {"has_key": bool(keys), "has_index": settings.index is not None, "mcp": settings.mcp}
            typer.echo(welcome(where, card, workers=settings.workers, **has))

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


def welcome(
    where: str, card: dict[str, Any], *, has_key: bool, workers: int, mcp: bool = False, has_index: bool = False
) -> str:
    """Return the message of a server that is ready: its model, what each route needs, and a line to try."""
    name = card["id"]
    encoder = f"; by {card['encoder']}, a second model in memory" if card["encoder"] else ""
    chat = "" if card["chat"] else "; answers 400, since this model has no chat template"
    forms = "" if find_spec("llguidance") else "; response_format needs pip install 'gerund[structured]'"
    judge = "the model's own scorer" if card["scorer"] == "own" else "the model's likelihoods"
    key = " -H 'Authorization: Bearer KEY'" if has_key else ""
    body = f'{{"model": "{name}", "input": "The old man looked at the sea."}}'
    return "\n".join([
        f"gerund: ready: {name} at {where}, {workers} worker{'s' if workers > 1 else ''}, fingerprint "
        f"{card['fingerprint']}",
        f"  guarantee: {card['guarantee']} ({card['why']})",
        f"  /v1/chat/completions  conversations, streams{chat}{forms}",
        "  /v1/responses         the same in the form of OpenAI's Responses API; nothing is stored",
        f"  /v1/completions       texts, streams; infills with suffix; best_of by {judge}",
        f"  /v1/embeddings        {card['dimensions']} dimensions, or fewer{encoder}",
        "  /v1/rerank /v2/rerank /rerank /v1/score /infill /tokenize /detokenize",
        "  /api/chat /api/generate /api/embed /api/embeddings /api/tags /api/ps /api/show /api/version, as Ollama",
        "  /v1/models /health /metrics /v1/attention /v1/search (with --index)",
        *([f"  model {name}+index: chats are answered from the index"] if has_index else []),
        *(["  /mcp                  the index, for programs that speak the Model Context Protocol"] if mcp else []),
        f"  {where}/ is a page to try all of it in a browser",
        f"  key: {'needed on every route' if has_key else 'none; only this machine can reach it'}",
        "Try:",
        f"  curl {where}/v1/embeddings -H 'Content-Type: application/json'{key} -d '{body}'",
    ])  # fmt: skip
