"""What training knows of the machine."""

import subprocess
import sys

import pytest

CHILD = """
from gerund.jobs.engine import peak_resident_mib
print(peak_resident_mib())
held = bytearray(b"x") * (200 * 2**20)
print(peak_resident_mib())
"""
LARGE_PARENT = f"""
import subprocess, sys
held = bytearray(b"x") * (3 * 2**28)
print(subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak counts the process that starts it")
def test_the_peak_is_of_this_process_alone_and_grows_with_what_is_held():
    done = subprocess.run([sys.executable, "-c", LARGE_PARENT], capture_output=True, text=True, check=True)
    before, holding = map(float, done.stdout.split())
    assert 5 < before < 500
    assert 190 < holding - before < 250
