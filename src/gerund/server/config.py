"""Server settings: address, keys, limits and the engine's options; and the YAML file with them."""

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gerund.checks import read_input
from gerund.data.yaml_text import parse_yaml
from gerund.engine.config import EngineConfig
from gerund.errors import ConfigError, DataError
from gerund.inference.generate.config import ToolPrompt
from gerund.settings.model_spec import ModelSpec

KEY_VARIABLE = "GERUND_API_KEY"
FINGERPRINT_HEADER = "X-Gerund-Fingerprint"
MOST_WORKERS = 64

Count = Annotated[int, Field(ge=1, le=10**9)]
Seconds = Annotated[float, Field(gt=0, le=10**6, allow_inf_nan=False)]

_LISTS = ("name", "allowed_host", "cors_origin")
_USUAL_PORTS = {"http": ":80", "https": ":443"}
_HOST = r"([^\s/:@?#\[\],]+|\[[0-9a-f:.]+\])"


def _origin(given: str) -> str:
    """Return an origin in the form that browsers send.

    >>> _origin("http://localhost:5173"), _origin("HTTPS://example.com:443")
    ('http://localhost:5173', 'https://example.com')
    """
    if given == "*":
        return given
    parts = re.fullmatch(rf"([a-z][a-z0-9+.-]*)://{_HOST}(:\d+)?", given.lower())
    if parts is None:
        raise ValueError(
            "an origin is a scheme, a host and perhaps a port, such as http://localhost:5173, or * for any"
        )
    scheme, host, port = parts.groups()
    return f"{scheme}://{host}{'' if port is None or port == _USUAL_PORTS.get(scheme) else port}"


def _host_name(given: str) -> str:
    """Return a host name in the form that is compared with a Host header.

    >>> _host_name("Models.example"), _host_name("[2001:db8::1]")
    ('models.example', '2001:db8::1')
    """
    if not re.fullmatch(_HOST, given.lower()):
        raise ValueError("a host is a name or [address] without scheme and port, such as models.example")
    return given.lower().strip("[]")


def host_in(header: str) -> str | None:
    """Return the host name in a Host header, without the port; None if the header is malformed.

    >>> [host_in(header) for header in ("[::1]:8000", "LOCALHOST:80", "127.0.0.1", "localhost:80@other")]
    ['::1', 'localhost', '127.0.0.1', None]
    """
    parts = re.fullmatch(rf"{_HOST}(:\d*)?", header.strip().lower())
    return None if parts is None else parts[1].strip("[]")


class ServerConfig(BaseModel):
    """Settings of a server; of the engine's options, those that ``gerund serve`` has.

    >>> ServerConfig(port=9000).is_local
    True
    >>> ServerConfig(host="0.0.0.0").check_keys([])
    Traceback (most recent call last):
    gerund.errors.ConfigError: 0.0.0.0 can be reached from other machines, so a key is needed: put one into ...
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on; one that other machines can reach needs a key."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """Port to listen on; 0 for a free one."""
    name: tuple[Annotated[str, Field(min_length=1, max_length=200, pattern=r"^\S+$")], ...] = ()
    """What clients call the model; repeated, the first is listed. Default: the last part of the model's name."""
    api_key_file: str | None = None
    """File with one API key per line. Or put one key into GERUND_API_KEY."""
    allowed_host: tuple[Annotated[str, AfterValidator(_host_name)], ...] = ()
    """Answer to this host name too, such as a reverse proxy's; repeatable. On a loopback address only these and this
    machine's names are answered, so that no page can reach it by DNS rebinding; elsewhere all names, unless some are
    given here."""
    cors_origin: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()
    """Let pages of this origin read answers in a browser (CORS), such as http://localhost:5173; repeatable. ``*`` is
    for any, and can't be combined with a key."""
    index: str | None = None
    """An index of documents to search with this model; see gerund index."""
    encoder: str | None = None
    """Another model for embeddings, similarities and the index: a folder, GGUF file, short name or hub id, or st: and
    one that sentence-transformers runs. It takes memory of its own."""
    mcp: bool = False
    """Offer the index at /mcp to programs that speak the Model Context Protocol (streamable HTTP)."""
    allow_add: bool = False
    """Let programs store texts in the index, through /mcp."""
    workers: Annotated[int, Field(ge=1, le=MOST_WORKERS)] = 1
    """Processes behind the one address, each with a copy of the model."""
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Threads per worker. Default: the processor's cores divided among the workers."""
    tool_prompt: ToolPrompt | None = None
    """How tools are described to a model whose chat template knows none: generic, or smollm2 in the words that SmolLM2
    was trained on. Default: the model's own template, and 400 where it knows no tools."""
    max_new_tokens: Count = 1024
    """Most tokens of an answer in a chat whose request does not say."""
    timeout: Seconds = 120.0
    """Seconds that a request may take, waiting included."""
    drain: Seconds = 30.0
    """Seconds that running requests get to finish when the server is stopped."""
    body_limit: Count = 8 * 2**20
    """Most bytes of the body of a request."""
    body_timeout: Seconds = 30.0
    """Seconds in which a request has to arrive completely."""
    log: Literal["text", "json", "none"] = "text"
    """text, json or none: one line per request on standard error, without its texts."""
    slots: Count = 8
    """Number of texts that are generated concurrently."""
    context: Count | None = None
    """Tokens of a slot, prompt and text. Default: the model's context, at most 2048."""
    prefill_tokens: Count = 256
    """Tokens that are read between two decoding steps."""
    decode_ratio: Annotated[float, Field(gt=0, le=1000, allow_inf_nan=False)] = 1.0
    """Seconds of decoding for each second of reading while both wait."""
    queue_tokens: Count = 65536
    """Tokens that may wait; beyond, clients are told to retry."""
    exact: bool = False
    """Generate one text at a time: bit-identical to gerund generate on every machine, and slower for many clients."""
    reproducible: bool = True
    """A text does not depend on what else is generated (the default); without, few clients are served faster."""

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if not self.host or any(letter.isspace() for letter in self.host):
            raise ValueError(f"host={self.host!r} is no address; 127.0.0.1 is this machine alone")
        if self.mcp and self.index is None:
            raise ValueError("--mcp offers an index, so name one with --index")
        if self.allow_add and not self.mcp:
            raise ValueError("--allow-add is for programs at /mcp, so it needs --mcp")
        _ = self.engine  # so that contradictory options fail before a model is loaded
        return self

    @property
    def engine(self) -> EngineConfig:
        """The engine's settings."""
        names = [field.name for field in fields(EngineConfig) if field.name in ServerConfig.model_fields]
        return EngineConfig(**{name: getattr(self, name) for name in names})

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the address."""
        return is_loopback(self.host)

    def check_keys(self, keys: "list[str]") -> None:
        """Raise an error for an address that other machines can reach without a key, and for any origin with a key."""
        if keys and "*" in self.cors_origin:
            raise ConfigError(
                "cors_origin='*' lets every website ask, which contradicts a key; name the origins, such as "
                "http://localhost:5173"
            )
        if not keys and not self.is_local:
            raise ConfigError(
                f"{self.host} can be reached from other machines, so a key is needed: put one into {KEY_VARIABLE} or "
                "into a file for --api-key-file; or listen on 127.0.0.1"
            )


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine reaches.

    >>> [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "example.org")]
    [True, True, True, False, False]
    """
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_keys(file: str | None, environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the API keys in a file, or else the key in the variable ``GERUND_API_KEY``, or none."""
    environment = os.environ if environment is None else environment
    keys = [environment[KEY_VARIABLE]] if KEY_VARIABLE in environment else []
    where = f"the variable {KEY_VARIABLE}"
    if file is not None:
        where = file
        try:
            lines = read_input(where).splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{where} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        keys = [line.strip() for line in lines if line.strip()]
        if not keys:
            raise DataError(f"{where} holds no key; write one a line")
    for key in keys:
        if not key or not key.isascii() or not key.isprintable() or " " in key:
            # The message must not contain the key.
            raise ConfigError(f"{where} holds a key that is empty or has other characters than visible ASCII")
    return keys


def read_config(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings of the model and of the server from a YAML file; names may have ``_`` or ``-``."""
    try:
        content = parse_yaml(read_input(path))
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise DataError(f"{path} is not valid YAML: {error}") from error
    if content is None:
        return {}, {}
    if not isinstance(content, Mapping):
        raise DataError(f"{path} holds no settings: names and values, such as 'port: 8000'")
    model: dict[str, Any] = {}
    server: dict[str, Any] = {}
    valid = [*ModelSpec.model_fields, *ServerConfig.model_fields]
    for setting, value in content.items():
        name = str(setting).replace("-", "_")
        if name in ("api_key", "key"):
            raise ConfigError(f"{path}: a key does not belong into this file; give api_key_file, or {KEY_VARIABLE}")
        if name not in valid:
            near = get_close_matches(name, valid, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "gerund serve --help lists them"
            raise ConfigError(f"{path}: there is no setting {setting!r}; {hint}")
        if value is not None:
            if name in _LISTS and isinstance(value, str):
                value = [value]
            (server if name in ServerConfig.model_fields else model)[name] = value
    return model, server


def settings_of(given: Mapping[str, Any]) -> ServerConfig:
    """Validate settings."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    try:
        return ServerConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(f"{name}={first['input']!r}: {message}" if name else message) from error
