"""Commands and the server with the model on a second device: no tensor around the verbs is made on the wrong one."""

import json
import threading

import numpy as np
import pytest
import torch

from gerund.entry import load
from tests.cli.helpers import run_cli
from tests.second_device import DEVICE, SecondDevice
from tests.tiny import save_tiny

SENTENCES = (
    "the old man looked at the sea",
    "rain fell on a quiet harbour",
    "a cat sat on the mat",
    "the house is red",
)
PROCESSOR = "cpu"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model, and files for each command."""
    place = tmp_path_factory.mktemp("second")
    save_tiny(place / "model", "llama")
    lines = [f"{SENTENCES[i % 4]} {i}" for i in range(12)]
    (place / "books.jsonl").write_text(
        "".join(json.dumps({"text": " ".join(f"{one.capitalize()}." for one in lines)}) + "\n" for _ in range(2))
    )
    sts = place / "data" / "sts"
    sts.mkdir(parents=True)
    (sts / "small.test.tsv").write_text("".join(f"{i % 6}\t{lines[i]}\t{lines[-1 - i]}\n" for i in range(12)))
    notes = place / "notes"
    notes.mkdir()
    for number, line in enumerate(lines):
        (notes / f"{number:02}.txt").write_text(f"{line}.\n")
    return place


def evaluated(run, folder, out):
    plans = ["--plan", "causal", "--plan", "mask0-bidir:k=2"]
    run("eval", folder / "model", "--tasks", "sts", "--data", folder / "data", "-o", out / "r", "--no-pictures", *plans)
    told = [json.loads(path.read_text())["score"]["metrics"] for path in sorted((out / "r" / "scores").glob("*.json"))]
    assert len(told) == 2
    return told


def found(run, folder, out):
    run("index", folder / "notes", "-o", out / "my.index", "-m", folder / "model", "--chunk-tokens", 40)
    told = run("search", out / "my.index", "the sea", "--json", "-k", 12, "-m", folder / "model")
    hits = [json.loads(line) for line in told.splitlines()]
    hits = hits[0] if len(hits) == 1 and isinstance(hits[0], list) else hits
    return json.loads(json.dumps(hits))


def continued(run, folder, out):
    options = ["--generate", 1, "--per-document", 3, "--prefix-words", 14, "--fewest-words", 3, "--most-words", 9]
    run("negatives", folder / "books.jsonl", "-o", out / "n", "-m", folder / "model", *options)
    return [json.loads(line) for line in (out / "n" / "part-00000.jsonl").read_text().splitlines()]


def inspected(run, folder, out):
    told = json.loads(run("inspect", folder / "model", SENTENCES[0], "--json"))
    return {name: value for name, value in told.items() if name != "device"}


def diagnosed(run, folder, out):
    told = json.loads(run("doctor", folder / "model", "--json"))
    return {name: value for name, value in told.items() if "plan" in name or "prob" in name}


COMMANDS = (evaluated, found, continued, inspected, diagnosed)


@pytest.mark.sweep(quick=0, check=3)
@pytest.mark.parametrize("command", COMMANDS, ids=lambda one: one.__name__)
def test_command(folder, tmp_path, monkeypatch, command):
    # The CPU's own arithmetic would be compared with bfloat16, for which the second device has no autocast.
    monkeypatch.setattr("gerund.language_model.choose_autocast", lambda runtime: None)

    def results(device):
        def run(*arguments):
            ran = run_cli(*arguments, "--device", device, "--dtype", "float32")
            assert ran.code == 0, ran.err
            return ran.out

        out = tmp_path / device
        out.mkdir()
        return command(run, folder, out)

    expected = results(PROCESSOR)
    with SecondDevice() as device:
        seen = results(DEVICE.type)
    assert device.operations > 50
    near(seen, expected)


def near(seen, expected):
    """Compare what commands tell: the same words, and numbers but for rounding."""
    if isinstance(expected, dict):
        assert seen.keys() == expected.keys()
        for name, value in expected.items():
            near(seen[name], value)
    elif isinstance(expected, list | np.ndarray):
        assert len(seen) == len(expected)
        for one, other in zip(seen, expected, strict=True):
            near(one, other)
    elif isinstance(expected, float | np.floating):
        assert seen == pytest.approx(expected, abs=2e-4)
    else:
        assert seen == expected


ROUTES = {
    "/v1/embeddings": {"input": list(SENTENCES)},
    "/v1/completions": {"prompt": SENTENCES[0], "max_tokens": 6, "temperature": 0, "logprobs": 2},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0.9, "seed": 3,
    },
    "/infill": {"input_prefix": "the old", "input_suffix": "the sea", "n_predict": 4},
    "/v1/rerank": {"query": "the sea", "documents": list(SENTENCES)},
    "/v1/score": {"text_1": SENTENCES[0], "text_2": list(SENTENCES)},
    "/v1/attention": {"text": SENTENCES[0]},
    "/tokenize": {"content": SENTENCES[0]},
}  # fmt: skip


@pytest.mark.slow
def test_every_route_of_the_server(tmp_path, monkeypatch):
    conftest = pytest.importorskip("tests.server.conftest", reason="needs gerund[serve]")
    monkeypatch.setattr("gerund.language_model.choose_autocast", lambda runtime: None)
    place = conftest.save_served(tmp_path / "model")

    def answers(device):
        with conftest.Running(load(place, device=device, dtype="float32"), conftest.ServerConfig(), []) as running:
            return {route: without_times(running.ok(route, **body)) for route, body in ROUTES.items()}

    expected = answers(PROCESSOR)
    own = threading.Thread._bootstrap_inner

    def inside(thread):  # a block counts in its own thread only
        with SecondDevice():
            own(thread)

    monkeypatch.setattr(threading.Thread, "_bootstrap_inner", inside)
    monkeypatch.setattr(torch, "autocast", torch.autocast)  # which the blocks of several threads put back in any order
    with SecondDevice() as device:
        seen = answers(DEVICE.type)
    assert device.operations > 50
    near(seen, expected)


def without_times(answer):
    """Return an answer without what differs from one to the next."""
    if answer.get("rerank"):
        answer["rerank"].pop("seconds")
    return {name: value for name, value in answer.items() if name not in ("id", "created", "timings", "model")}
