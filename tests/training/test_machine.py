"""What training knows of the machine."""

import subprocess
import sys

import pytest

from gerund.training.machine import peak_memory_mib

CHILD = "from gerund.training.machine import peak_memory_mib; print(peak_memory_mib())"
LARGE_PARENT = f"""
import subprocess, sys
held = bytearray(b"x") * (3 * 2**29)
print(subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True, check=True).stdout)
"""


def test_the_peak_grows_with_what_is_held():
    before = peak_memory_mib()
    held = bytearray(b"x") * ((before + 100) * 2**20)
    assert peak_memory_mib() >= before + 50
    del held


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak counts the process that starts it")
def test_the_peak_is_of_this_process_alone():
    done = subprocess.run([sys.executable, "-c", LARGE_PARENT], capture_output=True, text=True, check=True)
    assert 50 < int(done.stdout) < 1000
