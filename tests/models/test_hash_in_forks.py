"""The hash of weights in forked processes, where torch's own threads have to be made anew."""

import os
import subprocess
import sys

import pytest

FORKS = """
import os, torch
from gerund.models.fingerprint import weights_hash
torch.set_num_threads(1)
state = {f"w{number}": torch.ones(300, 300).bfloat16() * number for number in range(40)}
wanted, failed = weights_hash(state), 0
for _ in range(40):
    child = os.fork()
    if not child:
        try:
            os._exit(weights_hash(state) != wanted)
        except BaseException:
            os._exit(2)
    failed += os.waitpid(child, 0)[1] != 0
print(failed)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_same_in_forked_processes() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout == "0\n", ran.stderr[-2000:]
