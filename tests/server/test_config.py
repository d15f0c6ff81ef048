"""How a server is run: options, the file, keys, addresses."""

from pathlib import Path

import pytest

from gerund.errors import ConfigError, DataError
from gerund.server.config import KEY_VARIABLE, ServerConfig, is_loopback, read_config, read_keys, settings_of
from gerund.settings.model_spec import ModelSpec
from tests.cli.helpers import run_cli


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": 70000}, "port=70000"),
        ({"slots": 0}, "slots=0"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"name": ["a b"]}, "name.0='a b'"),
        ({"host": ""}, "is no address"),
        ({"log": "loud"}, "log='loud'"),
        ({"cors_origin": ["http://example.com/"]}, "cors_origin.0='http://example.com/': an origin is"),
        ({"cors_origin": ["a.example"]}, "cors_origin.0='a.example'"),
        ({"cors_origin": ["http://localhost"], "allowed_host": ["a b"]}, "allowed_host.0='a b'"),
        ({"allowed_host": ["models.example:80"]}, "a host is a name or [address] without scheme and port"),
        ({"allowed_host": [""]}, "allowed_host.0=''"),
        ({"exact": True, "reproducible": False}, "exact and reproducible=False contradict each other"),
    ],
)
def test_impossible_settings_are_told(given: dict, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        settings_of(given)
    assert said in str(found.value)


def test_a_file_has_the_options_by_name(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: ./some\nattention: causal\nport: 9000\nqueue-tokens: 100\nprefill_tokens: 64\nname: mine\n"
        "threads: null\n"
    )
    model, server = read_config(path)
    assert model == {"model": "./some", "attention": "causal"}
    assert server == {"port": 9000, "queue_tokens": 100, "prefill_tokens": 64, "name": ["mine"]}
    assert settings_of(server).name == ("mine",)
    path.write_text("")
    assert read_config(path) == ({}, {})


def test_what_is_typed_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[ModelSpec] = []
    monkeypatch.setattr("gerund.cli.serve.start", lambda spec, _settings: started.append(spec))
    path = tmp_path / "serve.yaml"
    path.write_text("model: smollm2\nattention: mask0-bidir\nk: 3\ndtype: float32\nport: 9000\n")
    for typed in ([], ["default"], ["--attention", "bidir", "--dtype", "auto"], ["--pooling", "last"]):
        assert run_cli("serve", *typed, "--config", path).code == 0, typed
    file = ModelSpec(model="smollm2", attention="mask0-bidir", k=3, dtype="float32")
    assert started == [
        file,
        file.model_copy(update={"model": "default"}),
        ModelSpec(model="smollm2", attention="bidir"),
        file.model_copy(update={"pooling": "last"}),
    ]
    path.write_text("k: 3\n")
    assert run_cli("serve", "--attention", "mask0-bidir", "--config", path).code == 0
    assert started[-1].k == 3
    assert "model" not in started[-1].model_fields_set  # so that an index may name it


@pytest.mark.parametrize(
    ("content", "kind", "said"),
    [
        ("queue-token: 1", ConfigError, "did you mean 'queue_tokens'"),
        ("api_key: secret-thing", ConfigError, "does not belong into this file"),
        ("- a", DataError, "names and values"),
        ("a: [", DataError, "not valid YAML"),
        ("[" * 3000, DataError, "not valid YAML"),
        ("port: 2024-13-01", DataError, "not valid YAML"),
        (f"port: {'1' * 4301}", DataError, "not valid YAML"),
        ("!!python/object/apply:os.getcwd []", DataError, "not valid YAML"),
    ],
)
def test_a_wrong_file_is_told(tmp_path: Path, content: str, kind: type[Exception], said: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    with pytest.raises(kind) as found:
        read_config(path)
    assert said in str(found.value)
    assert "secret-thing" not in str(found.value)


def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    own = ServerConfig(api_key_file=str(file))
    assert read_keys(own.api_key_file, {}) == ["one", "two"]
    assert read_keys(own.api_key_file, {KEY_VARIABLE: "three"}) == ["one", "two"], "the file wins"
    assert read_keys(None, {KEY_VARIABLE: "three"}) == ["three"]
    assert read_keys(None, {}) == []
    for bad in ("", "two words", "kéy"):
        with pytest.raises(ConfigError) as found:
            read_keys(None, {KEY_VARIABLE: bad})
        assert not bad or bad not in str(found.value), "a key is never shown"
    file.write_text("\n")
    with pytest.raises(DataError, match="holds no key"):
        read_keys(own.api_key_file, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_for_others_needs_a_key(host: str) -> None:
    assert not is_loopback(host)
    own = ServerConfig(host=host)
    with pytest.raises(ConfigError, match="a key is needed"):
        own.check_keys([])
    own.check_keys(["a-key"])
    ServerConfig(host="::1").check_keys([])


def test_the_example_is_a_file_of_settings() -> None:
    model, server = read_config(Path(__file__).resolve().parents[2] / "examples" / "serve" / "serve.yaml")
    assert model == {"model": "default"}
    assert settings_of(server) == ServerConfig(name=("gerund",), log="json"), "it shows the defaults"


def test_pages_of_any_origin_and_a_key_contradict_each_other() -> None:
    any_page = settings_of({"cors_origin": ["http://localhost:5173", "*"]})
    any_page.check_keys([])
    with pytest.raises(ConfigError, match="lets every website ask, which contradicts a key"):
        any_page.check_keys(["secret"])
    settings_of({"cors_origin": ["http://localhost:5173"]}).check_keys(["secret"])


def test_origins_and_hosts_are_compared_as_browsers_send_them(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("cors-origin: HTTP://Example.com:80\nallowed_host: [Models.Example, '[2001:DB8::1]']\n")
    settings = settings_of(read_config(path)[1])
    assert settings.cors_origin == ("http://example.com",)
    assert settings.allowed_host == ("models.example", "2001:db8::1")
    assert settings_of({"cors_origin": ["tauri://localhost"]}).cors_origin == ("tauri://localhost",)
