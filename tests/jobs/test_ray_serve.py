"""The example of replicas on Ray Serve: two of them answer as the library does, also after one was killed.

Run where ``ray[serve]`` is installed, in a network of its own, since Ray listens on every interface.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.test_ray_engine import environment, namespace
from tests.tiny import save_tiny

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("ray"), reason="ray is not installed")
@pytest.mark.skipif(not importlib.util.find_spec("grpc_reflection"), reason="ray[serve] is not installed")
def test_two_replicas_answer_as_the_library_does(tmp_path):
    if not (alone := namespace()):
        pytest.skip("needs a network namespace: unshare -n")
    env = environment() | {
        "RAY_AUTH_TOKEN": "of-this-test-alone", "GERUND_API_KEY": "key",
        "GERUND_MODEL": str(save_tiny(tmp_path / "model")),
    }  # fmt: skip
    with (tmp_path / "log").open("w") as log:
        ran = subprocess.run(
            [*alone, sys.executable, "-m", "tests.jobs.serve_session", str(tmp_path)],
            stdout=subprocess.PIPE, stderr=log, env=env, cwd=ROOT, timeout=SECONDS, check=False, text=True,
        )  # fmt: skip
    assert ran.returncode == 0, (ran.stdout, (tmp_path / "log").read_text()[-3000:])
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["replicas"] == 2
    assert found["without key"] == 401
    assert found["difference"] < 1e-6
    assert found["answered after a kill"] == found["asked after a kill"]
    assert found["replicas after a kill"] == 2
    assert found["ended"] == 0
