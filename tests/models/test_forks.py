"""Forked processes, where torch's own pool of threads has to be made anew before several threads use torch."""

import os
import subprocess
import sys

import pytest

FORKS = """
import os, sys, torch
from concurrent.futures import ThreadPoolExecutor
from gerund.models.fingerprint import weights_hash
from gerund.models.library_calls import guarded

def cast(state):  # what transformers does with weights of another type
    with ThreadPoolExecutor(max_workers=4) as pool:
        return sum(pool.map(lambda weight: float(weight.float().sum()), state.values()))

work = weights_hash if sys.argv[1] == "hash" else lambda state: guarded("cannot load", cast, state)
torch.set_num_threads(1)
state = {f"w{number}": torch.ones(300, 300).bfloat16() * number for number in range(40)}
wanted, failed = work(state), 0
for _ in range(40):
    child = os.fork()
    if not child:
        try:
            os._exit(work(state) != wanted)
        except BaseException:
            os._exit(2)
    failed += os.waitpid(child, 0)[1] != 0
print(failed)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.parametrize("work", ["hash", "load"])
def test_the_same_in_forked_processes(work: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", FORKS, work], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout == "0\n", ran.stderr[-2000:]
