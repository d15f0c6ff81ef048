"""What the command line does whatever the command is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full is Linux's")
@pytest.mark.parametrize("command", [["recipes"], ["--version"], ["train", "--help"]])
def test_an_output_that_cannot_be_written_is_one_sentence(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "gerund", *command],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        )
    assert done.stderr == "gerund: error: the output cannot be written: No space left on device\n"
    assert done.returncode == 1
