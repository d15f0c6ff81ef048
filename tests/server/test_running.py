"""Real processes: how they start, clients that go, full queues, workers."""

import itertools
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gerund.entry import load
from gerund.server.config import ServerConfig
from gerund.server.connections import listen
from tests.cli.helpers import ENVIRONMENT, run_cli, run_python
from tests.server.conftest import Running, index_of, until


class Process:
    """``gerund serve`` as a program.

    Attributes:
        url: its address.
        said: the lines of its standard output so far.
    """

    def __init__(self, *arguments: object, **environment: str) -> None:
        command = [sys.executable, "-m", "gerund", "serve", *map(str, arguments), "--port", "0"]
        settings = {"env": {**ENVIRONMENT, **environment}, "text": True, "bufsize": 1}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **settings)
        self.said: list[str] = []
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(self.process.stdout, self.said), daemon=True),
            threading.Thread(target=self._read, args=(self.process.stderr, self.errors), daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    @staticmethod
    def _read(stream: Any, into: list[str]) -> None:
        with stream:
            for line in stream:
                into.append(line)

    def ready(self, seconds: float = 90) -> "Process":
        """Wait until it serves."""

        def is_ready() -> bool:
            return any("ready:" in line for line in self.said)

        until(lambda: is_ready() or self.process.poll() is not None, seconds)
        assert is_ready(), f"it did not start: {self.said} {self.errors}"
        found = re.search(r"http://\S+", self.said[0])
        assert found is not None
        self.url = found.group().rstrip(";")
        return self

    def ended(self, seconds: float = 90) -> int:
        """Wait until it ends and all that it said is there; return the status."""
        status = self.process.wait(seconds)
        for reader in self._readers:
            reader.join(5)
        return status

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the status."""
        self.process.send_signal(number)
        return self.ended(40)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.ended()


def refusal(*arguments: object, **environment: str) -> str:
    """Return the one sentence with which the command refuses to start."""
    with Process(*arguments, **environment) as own:
        assert own.ended() == 2
        [line] = own.errors
        return line


def refused(*arguments: object) -> str:
    """Return the same sentence of the command in this process, whose logging stays as it was."""
    logger = logging.getLogger("gerund.server")
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        return run_cli("serve", *arguments, "--port", "0").mistake
    finally:
        logger.handlers[:], logger.propagate = before[:2]
        logger.setLevel(before[2])


# ----------------------------------------------------------------------------------------------------------- the start


@pytest.mark.slow
def test_what_cannot_be_served_is_one_sentence(
    tmp_path: Path, served_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        done = run_python("-m", "gerund", "serve", served_folder, "--port", str(port), check=False)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"port {port} of 127.0.0.1 is in use" in done.stderr
    assert "secret" not in refusal(served_folder, GERUND_API_KEY="se cret")
    assert "a key is needed" in refused(served_folder, "--host", "0.0.0.0")
    assert "slots=0" in refused(served_folder, "--slots", "0")
    assert "nowhere" in refused(tmp_path / "nowhere")
    assert "unknown pooling" in refused(served_folder, "--pooling", "medium")
    assert "there is no setting" in refused("--config", write(tmp_path / "serve.yaml", "ports: 1"))
    monkeypatch.setenv("GERUND_API_KEY", "a-key")
    assert "no address host.invalid" in refused(served_folder, "--host", "host.invalid")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    with Process(tmp_path / "model") as own:
        assert own.ended() == 2
        assert "gerund: error:" in own.errors[-1]
        assert not any("Traceback" in line for line in own.errors)


@pytest.mark.slow
def test_a_file_says_it_all_and_an_index_which_model_made_it(tmp_path: Path, served_folder: Path) -> None:
    lm = load(served_folder, attention="causal")
    index = index_of(tmp_path / "my.index", lm, {"bread": "Bread is made of flour."})
    keys = write(tmp_path / "keys", "the-key\n")
    content = f"index: {index}\nname: [mine, other]\napi_key_file: {keys}\nlog: json\n"
    config = write(tmp_path / "serve.yaml", content)
    with Process("--config", config, "--name", "typed") as own:
        own.ready()
        said = "".join(own.said)
        assert "typed" in said
        assert "key: needed on every route" in said
        assert "the-key" not in said
        assert httpx.get(f"{own.url}/health").status_code == 401
        with httpx.Client(base_url=own.url, headers={"Authorization": "Bearer the-key"}, timeout=30) as client:
            assert client.get("/v1/models").json()["data"][0]["id"] == "typed"
            assert client.get("/health").json()["fingerprint"] == lm.fingerprint()
            found = client.post("/v1/search", json={"query": "bread"}).json()
        assert [hit["source"] for hit in found["data"]] == ["bread"]
        assert own.end() == 0
    noted = [json.loads(line) for line in own.errors]
    assert {"request", "ending", "ended"} <= {one["event"] for one in noted}
    assert "the-key" not in "".join(own.errors)


# ------------------------------------------------------------------------------------------------------------ the load


@pytest.fixture
def small(served_folder: Path) -> Iterator[Running]:
    """A server with a small queue and one slot."""
    with Running(load(served_folder), ServerConfig(queue_tokens=700, slots=1, timeout=20), []) as running:
        yield running


LONG: dict[str, Any] = {"prompt": "the", "max_tokens": 400, "temperature": 0, "logit_bias": {"2": -100}}


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_goes_cancels_its_request(
    small: Running, streams: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("gerund.server"), "propagate", True)
    caplog.set_level(logging.INFO, "gerund.server")
    before = small.service.engine.state().cancelled
    client = httpx.Client(base_url=small.url, timeout=0.3)
    if streams:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            client.post("/v1/completions", json=LONG)
    client.close()
    assert small.idle(5)
    assert small.service.engine.state().cancelled == before + 1
    until(lambda: any(record.getMessage() == "request" for record in caplog.records), 5)
    assert [record.getMessage() for record in caplog.records] == ["request"], "to go is no defect of the server"


@pytest.mark.slow
def test_a_request_has_a_deadline(served_folder: Path) -> None:
    with Running(load(served_folder), ServerConfig(timeout=0.2), []) as running:
        found = running.post("/v1/completions", **{**LONG, "n": 8, "temperature": 1})
        assert (found.status_code, found.json()["error"]["code"]) == (504, "timeout")
        assert running.idle()
        assert running.ok("/v1/completions", prompt="a", max_tokens=1)


# --------------------------------------------------------------------------------------------------------- the workers


@pytest.mark.slow
def test_workers_share_a_port_and_are_replaced(served_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(served_folder, folder)
    with Process(folder, "--workers", "2", "--log", "none") as own:
        own.ready()
        children = children_of(own.process.pid)
        assert len(children) >= 2

        def ask() -> int:
            try:
                body = {"prompt": "the", "max_tokens": 3, "temperature": 0}
                return httpx.post(f"{own.url}/v1/completions", json=body, timeout=30).status_code
            except httpx.TransportError:
                return 0

        assert [ask() for _ in range(8)] == [200] * 8
        text = httpx.get(f"{own.url}/metrics", timeout=30).text
        counted = re.search(r'gerund_requests_total\{route="/v1/completions",status="200"\} (\S+)', text)
        assert counted is not None
        assert float(counted.group(1)) == 8, "whichever worker is asked adds up what all have done"
        ends, written = time.monotonic() + 20, 0.0
        with httpx.Client() as scraper:  # one connection, so one worker, which asks the others nothing
            while time.monotonic() < ends and written < 24:
                text = scraper.get(f"{own.url}/metrics", timeout=30).text
                found = re.search(r"^gerund_tokens_written_total (\S+)", text, re.MULTILINE)
                written = float(found.group(1)) if found else 0.0
                time.sleep(0.5)
        assert written >= 24, "what the engines of all workers have written"
        with httpx.Client(base_url=own.url, timeout=30) as client:
            client.get("/health")
            took = [client.get("/health").elapsed.total_seconds() for _ in range(20)]
        assert min(took) < 0.03, "what workers accept sends at once too"

        def health() -> dict[str, Any]:
            return httpx.get(f"{own.url}/health", timeout=30).json()

        def until(condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
            ends = time.monotonic() + 120
            while not condition(answer := health()):
                assert answer["status"] == "ok", "nobody is sent to a worker that is still loading"
                assert time.monotonic() < ends, answer
                time.sleep(0.2)
            return answer

        assert health()["workers"] == {"expected": 2, "ready": 2, "last_error": None}
        # A worker is lost, and another one cannot load: the model's folder is gone for a while.
        folder.rename(tmp_path / "elsewhere")
        os.kill(workers_of(children)[0], signal.SIGKILL)
        lost = until(lambda answer: answer["workers"]["ready"] == 1 and "status" not in answer["workers"]["last_error"])
        assert str(folder) in lost["workers"]["last_error"]
        assert own.process.poll() is None
        assert [ask() for _ in range(4)] == [200] * 4
        (tmp_path / "elsewhere").rename(folder)
        until(lambda answer: answer["workers"] == {"expected": 2, "ready": 2, "last_error": None})
        assert len(workers_of(children_of(own.process.pid))) == 2
        for process in workers_of(children_of(own.process.pid)):
            os.kill(process, signal.SIGINT)  # as Ctrl-C does, which their parent answers for them
        time.sleep(0.5)
        assert health()["workers"]["ready"] == 2
        assert any("worker cannot load" in line and "again_in=2s" in line for line in own.errors), own.errors
        assert own.end() == 0
    assert children_of(own.process.pid) == []


@pytest.mark.full  # two more processes that import torch; a supervisor of fake workers is tried in test_workers.py
def test_workers_end_with_the_process_that_started_them(served_folder: Path) -> None:
    with Process(served_folder, "--workers", "2", "--log", "none") as own:
        own.ready()
        workers = workers_of(children_of(own.process.pid))
        own.process.kill()
        own.process.wait()
        assert until(lambda: not any(Path(f"/proc/{one}").exists() for one in workers), 30)


def children_of(process: int) -> list[int]:
    """Return the processes that a process has started."""
    try:
        return [int(one) for one in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def workers_of(processes: list[int]) -> list[int]:
    """Return those that serve: not what multiprocessing starts for itself."""
    found = []
    for one in processes:
        try:
            if "spawn_main" in Path(f"/proc/{one}/cmdline").read_text():
                found.append(one)
        except OSError:
            continue
    return found


ALWAYS_LOADING = """
import sys
import torch
from gerund.cli.main import main
from gerund.server.service import Service

def load(self, spec):
    print("loads", flush=True)
    while True:
        torch.mm(torch.ones(1500, 1500), torch.ones(1500, 1500))

Service.load = load
sys.argv[1:] = ["serve", sys.argv[1], "--port", "0"]
main()
"""


def test_whoever_ends_it_while_it_loads_gets_status_0(tiny_folder):
    """Python's own way to end a process ends threads within torch's code, which is a crash."""
    command = [sys.executable, "-c", ALWAYS_LOADING, str(tiny_folder)]
    with subprocess.Popen(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert "listening" in process.stdout.readline()
        assert process.stdout.readline() == "loads\n"
        process.send_signal(signal.SIGTERM)
        out, errors = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "gerund: ended\n"), errors
    assert "terminate" not in errors


@pytest.mark.slow
def test_sigterm_drops_no_request_that_was_taken(served_folder: Path) -> None:
    lm = load(served_folder)
    expected = lm.generate("the", 60)[0].text
    vector = lm.encode("the ant")
    writes: dict[str, Any] = {"prompt": "the", "max_tokens": 60, "temperature": 0}
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", writes),
        ("/v1/embeddings", {"input": "the ant"}),
        ("/v1/completions", {**writes, "stream": True}),
    ]

    def is_right(kind: int, answer: httpx.Response) -> bool:
        if kind == 0:
            return bool(answer.json()["choices"][0]["text"] == expected)
        if kind == 1:
            return bool(abs(vector - answer.json()["data"][0]["embedding"]).max() < 1e-5)
        lines = [line for line in answer.text.splitlines() if line]
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
        return lines[-1] == "data: [DONE]" and "".join(texts) == expected

    with Process(served_folder, "--drain", "30", "--log", "json") as own:
        own.ready()
        answered: dict[str, bool] = {}
        begun: set[str] = set()
        refused: list[str] = []

        def ask(number: int) -> None:
            # Each request comes by a connection of its own: one that is kept may be closed at any time between two.
            alone = httpx.Limits(max_keepalive_connections=0)
            route, body = kinds[number % 3]
            with httpx.Client(base_url=own.url, timeout=60, limits=alone) as client:
                for turn in itertools.count():
                    name = f"{number}-{turn}"
                    try:
                        with client.stream("POST", route, json=body, headers={"X-Request-Id": name}) as answer:
                            begun.add(name)
                            answer.read()
                    except (httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError):
                        refused.append(name)
                        return
                    answered[name] = answer.status_code == 200 and is_right(number % 3, answer)

        threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(9)]
        for thread in threads:
            thread.start()
        time.sleep(1.5)
        began = time.monotonic()
        assert own.end() == 0
        assert time.monotonic() - began < 30
        for thread in threads:
            thread.join(30)
    noted = [json.loads(line) for line in own.errors]
    taken = {one["request"]: one["status"] for one in noted if one["event"] == "request"}
    assert len(answered) > 9
    assert all(answered.values())
    assert set(taken.values()) == {200}
    assert taken.keys() == answered.keys(), "what was taken was answered"
    assert len(refused) == 9, "every client was refused once, when the server had ended"
    assert not begun & set(refused), "no answer broke off"


@pytest.mark.slow
def test_what_is_not_done_by_the_end_is_told(served_folder: Path) -> None:
    # A drain of no time at all: what runs is given up, and its client hears of it.
    with Running(load(served_folder), ServerConfig(drain=0.01), []) as running:
        found: list[Any] = []

        def stream() -> None:
            with running.client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as answer:
                found.extend(line for line in answer.iter_lines() if line)

        thread = threading.Thread(target=stream)
        thread.start()
        until(lambda: running.service.engine.state().live_rows)
        running._server.should_exit = True
        thread.join(20)
        assert json.loads(found[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert running.service.phase == "ending"
