"""Shards on Ray: one session for all, in a network namespace where nobody else reaches it."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gerund.errors import ConfigError, ResourceError
from gerund.jobs.engine import make_engine
from tests.jobs import ray_session

ROOT = Path(__file__).resolve().parents[2]
# Under a minute on a quiet machine, of which starting processes is most; many times as long beside other work.
SECONDS = 280
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray: pip install 'gerund[ray]'")


def namespace() -> list[str]:
    """Return what runs a command in a network of its own; nothing where the system does not let us."""
    for flags in ("-n", "-rn"):
        way = ["unshare", flags, "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        if shutil.which("unshare") and not subprocess.call([*way, "true"], stderr=subprocess.DEVNULL, timeout=20):
            return way
    return []


def environment() -> dict[str, str]:
    """Return the variables of a process that uses Ray for itself, with a token."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return env | {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), env.get("PYTHONPATH", "")]),
        "RAY_AUTH_MODE": "token",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture(scope="module")
def seen(request, tmp_path_factory):
    """What the session saw, by the names of the checks that this run of the tests is for."""
    names = [item.callspec.params["name"] for item in request.session.items if item.originalname == "test_on_ray"]
    if not (alone := namespace()):
        # Ray listens on all interfaces of a machine.
        pytest.skip("needs a network namespace: unshare -n")
    folder = tmp_path_factory.mktemp("ray")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*alone, sys.executable, "-m", "tests.jobs.ray_session", str(folder), *names],
            stdout=subprocess.PIPE, stderr=log, env=environment(), cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        try:
            out = process.communicate(timeout=SECONDS)[0]
        except subprocess.TimeoutExpired:
            process.kill()  # and with the driver Ray ends itself
            out = process.communicate()[0]
    lines = [json.loads(line) for line in out.splitlines() if line.startswith(b"{")]
    text = (folder / "log").read_text()
    if not lines and "timed out during startup" in text:
        pytest.skip("Ray gives its own processes 30 s to start, and this machine is too busy for that")
    found = {line["check"]: line.get("wrong", "") for line in lines}
    return {name: found.get(name, f"not reached; log:\n{text[-3000:]}") for name in names}


@pytest.mark.full  # starting Ray's processes takes most of a minute
@needs_ray
@pytest.mark.parametrize("name", [check.__name__ for check in ray_session.CHECKS])
def test_on_ray(seen, name):
    assert not seen[name], seen[name]


@needs_ray
def test_no_cluster_is_started_unasked(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="--engine ray needs the --address of a Ray cluster"):
        make_engine("ray")


@needs_ray
def test_no_cluster_is_started_without_a_token(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(ConfigError, match="would let anyone who reaches this machine run code"):
        make_engine("ray", address="local")


@needs_ray
def test_a_cluster_that_does_not_answer_is_told_at_once(monkeypatch):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("it would try for minutes"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and listens not
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ResourceError, match=f"no Ray cluster answers at {address}: .*refused"):
            make_engine("ray", address=address)


def test_engines_by_name():
    with pytest.raises(ConfigError, match="unknown engine 'spark'; valid are: local, ray"):
        make_engine("spark")
    with pytest.raises(ConfigError, match="give --engine ray too"):
        make_engine("local", address="auto")
    with pytest.raises(ConfigError, match="got 0"):
        make_engine("ray", 0)
