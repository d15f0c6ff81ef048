"""Starts two processes that train together, or gerund as a program of its own; nothing waits for ever."""

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.training.processes.one_of_two import work

ROOT = Path(__file__).parents[3]
# Seconds; a quiet machine needs a fraction.
PATIENCE = 600


def start_two(target, folder):
    """Run ``target`` in two processes; return what each of them told."""
    # From a server that has imported everything once: two interpreters of their own would do it twice.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.processes.one_of_two"])
    port = free_port()
    started = [context.Process(target=target, args=(folder, rank, port)) for rank in range(2)]
    deadline = time.monotonic() + PATIENCE
    try:
        for process in started:
            process.start()
        for process in started:
            process.join(timeout=max(0, deadline - time.monotonic()))
        codes = [process.exitcode for process in started]
    finally:
        for process in started:
            process.kill()
    told = [(folder / f"told-{rank}.txt").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(told)
    return told


def run_two(folder, jobs):
    """Carry the jobs out in two processes; return what stopped each job in each of them."""
    folder.mkdir()
    (folder / "jobs.json").write_text(json.dumps(jobs))
    told = start_two(work, folder)
    # Only the first process shows its log.
    assert "step 1/" in told[0]
    assert "step" not in told[1]
    return list(zip(*(json.loads((folder / f"stopped-{rank}.json").read_text()) for rank in range(2)), strict=True))


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def started(*arguments):
    """Run gerund as a program of its own; one that hangs is asked to end, so that it ends its processes."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gerund", *arguments]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            said, told = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.terminate()
            said, told = process.communicate(timeout=60)
            raise
        finally:
            process.kill()
    return subprocess.CompletedProcess(command, process.returncode, said, told)
