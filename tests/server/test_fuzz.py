"""Requests that nobody would write, made from the server's own description of itself: none ends in a 5xx."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import Running

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "negative_data_rejection",
    "positive_data_acceptance",
)  # fmt: skip
# What a schema cannot say is refused all the same: ids of another tokenizer, fields that contradict each other.
SETTINGS = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", 400, 404, 409, 413]
"""


@pytest.mark.slow
def test_no_request_ends_in_a_5xx(live: Running, tmp_path: Path) -> None:
    before = requests(live)
    done = fuzzed(live, tmp_path)
    # Every route was chosen; how many of them there was time for depends on the machine.
    paths = live.client.get("/openapi.json").json()["paths"].values()
    routes = sum(method in ("get", "post") for path in paths for method in path)
    assert f"Tested: {routes}" in done or f"{routes} selected" in done, done[-3000:]
    tried = {route for route, count in requests(live).items() if count > before.get(route, 0)}
    assert {"/v1/embeddings", "/v1/chat/completions"} <= tried
    assert len(tried) >= 8, tried
    assert live.idle(20)
    assert live.ok("/v1/completions", prompt="a", max_tokens=2)["choices"]


@pytest.mark.filterwarnings("ignore:.*were cut:UserWarning")
@pytest.mark.slow
def test_chats_with_an_index(indexed: Running) -> None:
    pytest.importorskip("hypothesis")
    from hypothesis import HealthCheck, given, settings
    from hypothesis import strategies as any_

    values = any_json()
    texts = any_.sampled_from(["What is bread made of?", "", " ", "x", "the " * 900, "\0", '"bread']) | any_.text()
    roles = any_.sampled_from(["user", "assistant", "system", "tool", "x"])
    turns = any_.lists(any_.fixed_dictionaries({"role": roles, "content": texts | values}), max_size=5)
    some = {
        "stream": any_.booleans(),
        "temperature": any_.sampled_from([0, 0.5, 9]),
        "max_tokens": any_.sampled_from([0, 1, 5]),
        "options": any_.fixed_dictionaries({}, optional={"num_predict": any_.integers(-3, 9), "seed": any_.integers()}),
    }
    odd = any_.sampled_from(
        ["tools", "n", "stop", "response_format", "seed", "instructions", "system", "format", "options"]
    )
    content = {"/v1/chat/completions": "messages", "/v1/responses": "input", "/api/chat": "messages",
               "/api/generate": "prompt"}  # fmt: skip

    @settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(
        any_.sampled_from(sorted(content)),
        any_.one_of(texts, turns, values),
        any_.fixed_dictionaries({}, optional=some),
        any_.dictionaries(odd, values, max_size=1),
    )
    def check(route: str, given: Any, usual: dict[str, Any], more: dict[str, Any]) -> None:
        is_text = isinstance(given, str) and content[route] == "messages"
        asked = [{"role": "user", "content": given}] if is_text else given
        found = indexed.post(route, model="tiny+index", **{content[route]: asked}, **{**usual, **more})
        statuses[found.status_code] += 1
        assert found.status_code < 500, found.text
        assert "server_error" not in found.text

    statuses: Counter[int] = Counter()
    check()
    assert statuses[200] > 1
    assert indexed.idle(20)


def any_json() -> Any:
    """Return a strategy for any JSON."""
    from hypothesis import strategies as any_

    numbers = any_.integers() | any_.floats(allow_nan=False, allow_infinity=False)
    leaves = any_.none() | any_.booleans() | numbers | any_.text(max_size=9)
    return any_.recursive(leaves, lambda inner: any_.lists(inner) | any_.dictionaries(any_.text(max_size=5), inner))


def fuzzed(running: Running, folder: Path) -> str:
    """Send requests of schemathesis to a server, and return its report."""
    pytest.importorskip("schemathesis")
    program = Path(sys.executable).with_name("schemathesis")
    (folder / "schemathesis.toml").write_text(SETTINGS)
    command = [
        str(program), "run", f"{running.url}/openapi.json", "--mode", "all", "-n", "5", "--max-time", "15",
        "--request-timeout", "60", "--no-shrink", "--continue-on-failure", "--seed", "1", "--checks", ",".join(CHECKS),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


def requests(running: Running) -> Counter[str]:
    """Return how many requests each route has had."""
    counts: Counter[str] = Counter()
    for route, count in re.findall(
        r'^gerund_requests_total\{route="([^"]+)",.*\} (\S+)$', running.service.metrics.text().decode(), re.MULTILINE
    ):
        counts[route] += int(float(count))
    return counts
