"""SIGTERM is told as Ctrl-C is, and still ends the process as a SIGTERM."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from gerund.inference.encode import batches, sweep
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.jobs.signals import interrupt_deferred
from tests.cli.helpers import run_cli
from tests.data.mining.test_job import articles, write_jsonl

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
# What any of it takes at most on the busiest of machines.
SECONDS = 300
WAITING = """
import signal, sys, time
{before}
from gerund.jobs.signals import interrupt_on_termination
interrupt_on_termination()
try:
    print("ready", flush=True)  # in here, since the signal may come before the next line
    time.sleep(60)
except KeyboardInterrupt:
    print("tidied up", flush=True)
    {after}
    raise SystemExit(130)
"""
# The command with parts so small that it can be stopped between them.
SMALL_PARTS = """
if __name__ == "__main__":
    from functools import partial
    from gerund.data import mining
    mining.MiningConfig = partial(mining.MiningConfig, part_size=50_000)
    from gerund.cli.main import run
    run()
"""


# What a shell starts in the background ignores Ctrl-C, and so do its children.
_HEARS_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"


@contextmanager
def started(code, *arguments, **environment):
    """Start a process that is gone at the end, whatever has happened to it."""
    process = subprocess.Popen(
        [sys.executable, "-c", _HEARS_CTRL_C + code, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def waited_for(pipe, process):
    """Open a pipe for writing as soon as a process reads it."""
    deadline = time.monotonic() + SECONDS
    while True:
        try:
            handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
            break
        except OSError:  # nobody reads it yet
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.01)
    try:
        yield
    finally:
        os.close(handle)


def terminated(code, **environment):
    with started(code, **environment) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=SECONDS)
        return process.returncode, out


def test_tidies_up_and_dies_of_the_signal():
    assert terminated(WAITING.format(before="", after="")) == (-signal.SIGTERM, "tidied up\n")


def test_a_second_one_ends_it_at_once():
    again = "import os; os.kill(os.getpid(), signal.SIGTERM); print('never')"
    assert terminated(WAITING.format(before="", after=again)) == (-signal.SIGTERM, "tidied up\n")


def test_is_left_alone_where_it_must_be():
    own = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))"
    assert terminated(WAITING.format(before=own, after="")) == (7, "")
    # torchrun ends its processes this way, and they may be waiting for each other.
    assert terminated(WAITING.format(before="", after=""), WORLD_SIZE="2") == (-signal.SIGTERM, "")


@pytest.fixture
def heard():
    """Let SIGINT add to a list, and return the list."""
    found = []
    before = signal.signal(signal.SIGINT, lambda number, _: found.append(number))
    yield found
    signal.signal(signal.SIGINT, before)


def interrupt_and_fail():
    signal.raise_signal(signal.SIGINT)
    raise ChildProcessError


class TestPutOff:
    def test_the_first_one_acts_at_the_end_of_the_block(self, heard, capfd):
        own = signal.getsignal(signal.SIGINT)
        with interrupt_deferred("wait") as has_come:
            assert not has_come()
            signal.raise_signal(signal.SIGINT)
            assert has_come()
            assert heard == []
        assert heard == [signal.SIGINT]
        assert signal.getsignal(signal.SIGINT) is own
        assert capfd.readouterr().err == "wait\n"

    def test_the_second_one_acts_at_once(self, heard):
        with interrupt_deferred("wait"):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert heard == [signal.SIGINT]

    def test_an_error_goes_first(self, heard):
        with pytest.raises(ChildProcessError), interrupt_deferred("wait"):
            interrupt_and_fail()
        assert heard == []

    def test_what_is_ignored_stays_so(self, capfd):
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            with interrupt_deferred("wait") as has_come:
                signal.raise_signal(signal.SIGINT)
            assert not has_come()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        finally:
            signal.signal(signal.SIGINT, before)
        assert capfd.readouterr().err == ""

    def test_another_thread_changes_nothing(self, heard):
        own = signal.getsignal(signal.SIGINT)

        def look():
            with interrupt_deferred("wait") as has_come:
                return signal.getsignal(signal.SIGINT), has_come()

        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(look).result() == (own, False)
        assert heard == []


@pytest.mark.slow
def test_a_command_says_what_is_kept(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(4_000))
    parts = tmp_path / "out.jsonl.parts"
    with started(SMALL_PARTS, "mine", corpus, "-o", tmp_path / "out.jsonl", "-j", 2) as process:
        deadline = time.monotonic() + SECONDS
        while not list(parts.glob("part-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.02)  # by now the next shard is on its way through the pipe to a process that is ended
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=SECONDS)
    assert f"gerund: interrupted; finished parts are kept in {parts}: give --resume to go on from there\n" in err
    assert "Traceback" not in err
    assert process.returncode == -signal.SIGTERM
    assert not (parts / "lock").exists()


@pytest.mark.slow
def test_a_long_command_that_is_interrupted_before_its_work_says_so(tmp_path):
    """The command waits for its input; nothing was begun."""
    pipe = tmp_path / "in.txt"
    os.mkfifo(pipe)
    with started(SMALL_PARTS, "embed", pipe, "-o", tmp_path / "out.parquet") as process:
        with waited_for(pipe, process):
            process.send_signal(signal.SIGINT)
        # The pipe is closed now: Python hears a signal that came just before a read when the read returns.
        _, err = process.communicate(timeout=SECONDS)
    told = "nothing new was done yet; run the same command again"
    assert err.count(f"gerund: interrupted; {told}\n") == 1
    assert "Traceback" not in err
    assert not (tmp_path / "out.parquet.parts").exists()


class Passes:
    """The passes of a model through this process, of which that with a number may be interrupted."""

    def __init__(self, monkeypatch):
        self.count, self.stop_at, run = 0, None, EncoderRuntime.run

        def counted(runtime, *arguments):
            self.count += 1
            if self.count == self.stop_at:
                raise KeyboardInterrupt
            return run(runtime, *arguments)

        monkeypatch.setattr(EncoderRuntime, "run", counted)
        for module in (batches, sweep):
            monkeypatch.setattr(module, "default_batch_tokens", lambda *_: 64)

    def of(self, command, stop_at=None):
        """Run a command; return how many passes it made, and how it ended."""
        self.count, self.stop_at = 0, stop_at
        ran = run_cli(*command)
        return self.count, ran


# Where a processor has bfloat16, a model tries it first, and these passes would be counted.
FLOAT32 = ("--dtype", "float32")


def embedding(folder, model, target):
    (folder / "in.txt").write_text("".join(f"{'the cat and ' * (i % 4)}text {i}\n" for i in range(20)))
    return "embed", folder / "in.txt", "-m", model, "-o", target / "out.parquet", *FLOAT32


def evaluation(folder, model, target):
    (folder / "data" / "sts").mkdir(parents=True, exist_ok=True)
    rows = "".join(f"{i % 6}\tthe cat and text {i}\ta text {-i}\n" for i in range(40))
    (folder / "data" / "sts" / "small.test.tsv").write_text(rows)
    plans = "--plan", "causal", "--plan", "mask0-bidir:k=2"
    return "eval", model, "--tasks", "sts", "--data", folder / "data", "-o", target, "--no-pictures", *plans, *FLOAT32


def kept(target):
    """Return the bytes of the vectors that a command has kept, and the names of its scores."""
    vectors = [*target.glob("*.parquet"), *(target / "embeddings").rglob("*")]
    return {path.name: path.read_bytes() for path in vectors if path.is_file()} | {
        path.name: b"" for path in (target / "scores").glob("*")
    }


@pytest.mark.slow
@pytest.mark.parametrize("command", [embedding, evaluation])
def test_in_the_middle_of_a_shard_only_the_interrupted_pass_is_made_again(command, tiny_folder, tmp_path, monkeypatch):
    passes = Passes(monkeypatch)
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    undisturbed, ran = passes.of(command(tmp_path, tiny_folder, whole))
    assert ran.code == 0, ran.err
    assert undisturbed > 6
    for stop_at in (3, 2):
        _, ran = passes.of(command(tmp_path, tiny_folder, broken), stop_at)
        assert ran.code == 130
        assert ran.err.count("gerund: interrupted; ") == 1
    rest, ran = passes.of(command(tmp_path, tiny_folder, broken))
    assert (ran.code, rest) == (0, undisturbed - 3), ran.err
    assert kept(broken) == kept(whole)
    assert not list(broken.rglob("unfinished*"))
