"""Requests that nobody would write, made from the server's own description of itself: none ends in a 5xx."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.conftest import Running

CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "negative_data_rejection",
    "positive_data_acceptance",
)  # fmt: skip
# What a schema cannot say is refused all the same: ids of another tokenizer, fields that contradict each other.
SETTINGS = """
[checks]
positive_data_acceptance.expected-statuses = ["2xx", 400, 401, 404, 409, 413, 429]
"""


@pytest.mark.slow
def test_no_request_ends_in_a_5xx(live: Running, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    program = Path(sys.executable).with_name("schemathesis")
    (tmp_path / "schemathesis.toml").write_text(SETTINGS)
    command = [
        str(program), "run", f"{live.url}/openapi.json", "--mode", "all", "--max-time", "35", "-n", "25",
        "--request-timeout", "60", "--no-shrink", "--continue-on-failure", "--seed", "1", "--checks", ",".join(CHECKS),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    # Every route was chosen; how many of them there was time for depends on the machine.
    paths = live.client.get("/openapi.json").json()["paths"].values()
    routes = sum(method in ("get", "post") for path in paths for method in path)
    assert f"Tested: {routes}" in done.stdout or f"{routes} selected" in done.stdout, done.stdout[-3000:]
    assert live.idle(20)
    assert live.ok("/v1/completions", prompt="a", max_tokens=2)["choices"]
