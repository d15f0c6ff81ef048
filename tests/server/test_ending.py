"""How a server ends: what was taken is answered, what is not done in time is told."""

import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gerund.entry import load
from gerund.server.config import ServerConfig
from tests.server.conftest import Running
from tests.server.test_running import Process


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
    running = Running(load(served_folder), ServerConfig(drain=0.01), [])
    try:
        found: list[Any] = []

        def stream() -> None:
            body = {"prompt": "the", "max_tokens": 500, "temperature": 0, "logit_bias": {"2": -100}, "stream": True}
            with running.client.stream("POST", "/v1/completions", json=body) as answer:
                found.extend(line for line in answer.iter_lines() if line)

        thread = threading.Thread(target=stream)
        thread.start()
        ends = time.monotonic() + 20
        while not running.service.engine.state().live_rows and time.monotonic() < ends:
            time.sleep(0.01)
        running._server.should_exit = True
        thread.join(20)
        assert json.loads(found[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert running.service.phase == "ending"
    finally:
        running.stop()
