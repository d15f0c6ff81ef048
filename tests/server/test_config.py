"""How a server is run: options, the file, keys, addresses."""

from pathlib import Path

import pytest

from gerund.errors import ConfigError, DataError
from gerund.server.config import KEY_VARIABLE, ServerConfig, is_loopback, read_config, read_keys, settings_of


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"port": 70000}, "port=70000"),
        ({"port": "80"}, "port='80'"),
        ({"slots": 0}, "slots=0"),
        ({"timeout": -1}, "timeout=-1"),
        ({"timeout": float("nan")}, "timeout=nan"),
        ({"writing_ratio": 0}, "writing_ratio=0"),
        ({"name": ["a b"]}, "name.0='a b'"),
        ({"host": ""}, "is no address"),
        ({"log": "loud"}, "log='loud'"),
        ({"workers": 1000}, "workers=1000"),
        ({"exact": True, "compile": True}, "exact and compile contradict each other"),
        ({"exact": True, "reproducible": False}, "exact and reproducible=False contradict each other"),
    ],
)
def test_impossible_settings_are_told(given: dict, said: str) -> None:
    with pytest.raises(ConfigError) as found:
        settings_of(given)
    assert said in str(found.value)


def test_a_file_has_the_options_by_name(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: ./some\nattention: causal\nport: 9000\nqueue-tokens: 100\nname: mine\nthreads: null\n")
    model, server = read_config(path)
    assert model == {"model": "./some", "attention": "causal"}
    assert server == {"port": 9000, "queue_tokens": 100, "name": ["mine"]}
    assert settings_of(server).name == ("mine",)
    path.write_text("")
    assert read_config(path) == ({}, {})


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
    assert read_keys(own, {}) == ["one", "two"]
    assert read_keys(own, {KEY_VARIABLE: "three"}) == ["one", "two"], "what is named beats what lies around"
    assert read_keys(ServerConfig(), {KEY_VARIABLE: "three"}) == ["three"]
    assert read_keys(ServerConfig(), {}) == []
    for bad in ("", "two words", "kéy"):
        with pytest.raises(ConfigError) as found:
            read_keys(ServerConfig(), {KEY_VARIABLE: bad})
        assert not bad or bad not in str(found.value), "a key is never shown"
    file.write_text("\n")
    with pytest.raises(DataError, match="holds no key"):
        read_keys(own, {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
def test_an_address_for_others_needs_a_key(host: str) -> None:
    assert not is_loopback(host)
    own = ServerConfig(host=host)
    with pytest.raises(ConfigError, match="a key is needed"):
        own.demand_safe([])
    own.demand_safe(["a-key"])
    ServerConfig(host="::1").demand_safe([])


def test_the_example_is_a_file_of_settings() -> None:
    model, server = read_config(Path(__file__).resolve().parents[2] / "examples" / "serve" / "serve.yaml")
    assert model == {"model": "default"}
    assert settings_of(server) == ServerConfig(name=("gerund",), log="json"), "it shows the defaults"
