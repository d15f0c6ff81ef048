"""The servers that `serve.py` compares, each a process of its own, and clients of theirs.

Knows: commands, HTTP. Does not know: what is measured.
"""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import gerund
from harness import Spent

TEMPLATE = "{{ bos_token }}{% for one in messages %}{{ one['role'] }}: {{ one['content'] }}\n{% endfor %}assistant:"
TRANSFORMERS, BATCHING = "transformers serve", "transformers serve, batching"
FASTAPI, INFINITY = "sentence-transformers + FastAPI", "infinity"
LLAMA, LLAMA_HALF = "llama.cpp's server", "llama.cpp's server, bfloat16"
OURS, OURS_HALF = "gerund serve", "gerund serve, bfloat16"
_TICKS = os.sysconf("SC_CLK_TCK")
Task = Callable[[httpx.AsyncClient], Awaitable[Any]]


class Served:
    """A server in a process of its own.

    Attributes:
        name: what the tables call it.
        url: its address.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], port: int, model: str) -> None:
        self.name, self.process, self.model = name, process, model
        self.url = f"http://127.0.0.1:{port}"

    def cpu(self) -> float:
        """Return the processor time that the process has spent, in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def memory(self) -> float:
        """Return its resident size in MiB."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    def peak(self) -> float:
        """Return its largest resident size so far in MiB."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="utf-8").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 2**10

    def spend(self, work: Callable[["Served"], Awaitable[Any]]) -> tuple[Spent, Any]:
        """Load it, and return what it spent and what the load found."""
        cpu, wall = self.cpu(), time.perf_counter()
        found = asyncio.run(work(self))  # type: ignore[arg-type]
        return Spent(self.cpu() - cpu, time.perf_counter() - wall), found


@contextmanager
def serving(name: str, command: Sequence[object], port: int, model: str) -> Iterator[Served]:
    """Start a server, wait until it is healthy, and end it."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(part) for part in command], stdout=log, stderr=log)
        own = Served(name, process, port, model)
        try:
            ends = time.monotonic() + 900
            while not _is_healthy(own):
                if process.poll() is not None or time.monotonic() > ends:
                    log.seek(0)
                    raise SystemExit(f"{name} did not start: {log.read()[-1500:].decode(errors='replace')}")
                time.sleep(0.2)
            yield own
        finally:
            process.terminate()
            try:
                process.wait(40)
            except subprocess.TimeoutExpired:
                process.kill()


def _is_healthy(own: Served) -> bool:
    try:
        return httpx.get(f"{own.url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def ours(folder: Path, *options: object, name: str = OURS) -> Any:
    """Return gerund's server of a folder, read causally in float32."""
    return ours_as_it_comes(folder, "--attention", "causal", "--dtype", "float32", *options, name=name)


def ours_as_it_comes(model: Path, *options: object, name: str = OURS) -> Any:
    """Return gerund's server of a folder or GGUF file."""
    port = free_port()
    how = ["--port", port, "--name", "model", "--log", "none", "--queue-tokens", 10**6, "--timeout", 600]
    return serving(name, [sys.executable, "-m", "gerund", "serve", model, *how, *options], port, "model")


def transformers(folder: Path, *options: str, name: str) -> Any:
    """Return the server that comes with transformers."""
    port = free_port()
    program = Path(sys.executable).with_name("transformers")
    how = ["--host", "127.0.0.1", "--port", port, "--device", "cpu", "--dtype", "float32", "--log-level", "error"]
    return serving(name, [program, "serve", folder, *how, *options], port, str(folder))


def fastapi(folder: Path, width: int) -> Any:
    """Return sentence-transformers behind FastAPI."""
    port = free_port()
    child = json.dumps({"folder": str(folder), "width": width, "port": port})
    return serving(FASTAPI, [sys.executable, Path(__file__).with_name("serve.py"), "--child", child], port, "model")


def infinity(program: str, folder: Path) -> Any:
    """Return infinity, out of an environment of its own, with a model that lies in a folder without a chat template."""
    own, port = folder.with_name("infinity"), free_port()
    if not own.exists():  # it runs transformers 4, for which a few settings have other names
        shutil.copytree(folder, own)
        for name in ("modules.json", "config_sentence_transformers.json"):
            (own / name).unlink()  # without them the mean of the states is taken
        config = json.loads((own / "config.json").read_text(encoding="utf-8"))
        config["rope_theta"] = config.pop("rope_parameters")["rope_theta"]
        (own / "config.json").write_text(json.dumps(config), encoding="utf-8")
        tokenizer = json.loads((own / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"
        (own / "tokenizer_config.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    how = ["--model-id", own, "--served-model-name", "model", "--engine", "torch", "--device", "cpu"]
    how += ["--dtype", "float32", "--host", "127.0.0.1", "--port", port, "--url-prefix", "/v1"]
    how += ["--no-model-warmup", "--no-bettertransformer"]
    offline = ["env", "DO_NOT_TRACK=1", "HF_HUB_OFFLINE=1"]
    return serving(INFINITY, [*offline, program, "v2", *how], port, "model")


def run_fastapi(case: dict[str, Any]) -> None:
    """Serve embeddings as many do: an endpoint in the thread pool, around `encode`."""
    import uvicorn
    from fastapi import FastAPI
    from pydantic import BaseModel
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    class Body(BaseModel):
        input: list[str]

    body = Transformer(case["folder"], max_seq_length=1024)
    encoder = SentenceTransformer(modules=[body, Pooling(case["width"], "mean")], device="cpu")
    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/embeddings")
    def embeddings(asked: Body) -> dict[str, Any]:
        vectors = encoder.encode(asked.input, normalize_embeddings=True, show_progress_bar=False)
        return {"data": [{"embedding": vector.tolist()} for vector in vectors]}

    uvicorn.run(app, host="127.0.0.1", port=case["port"], log_level="error")


def llama_cpp(file: Path, slots: int, context: int, name: str) -> Any:
    """Return llama.cpp's server for a file of GGUF."""
    port = free_port()
    case = json.dumps({"file": str(file), "slots": slots, "context": context, "port": port})
    return serving(name, [sys.executable, __file__, case], port, "model")


def run_llama_cpp(case: dict[str, Any]) -> None:
    """Serve a file as llama.cpp does by itself, with a thread as the others; `main` below is this process."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_gpu_layers = case["file"], 0
    # Its context is that of all slots together.
    params.n_parallel, params.n_ctx = case["slots"], case["slots"] * case["context"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(os.environ.get("OMP_NUM_THREADS", "1"))
    params.hostnames, params.port, params.offline, params.ui = ["127.0.0.1"], case["port"], True, False
    params.verbosity = -1
    server = xllamacpp.Server(params)  # it answers in threads of its own
    signal.pause()
    del server


def save_plain(folder: Path) -> Any:
    """Write the bundled model's base with a chat template, and return it as the library reads it."""
    save_both(gerund.load(attention="causal", adapter="none", dtype="float32"), folder)
    return gerund.load(folder, attention="causal", dtype="float32")


def save_both(lm: Any, folder: Path) -> None:
    """Write a model with a chat template, and one without beside it."""
    # With a template sentence-transformers would take a text for a conversation.
    lm.save(plain_beside(folder))
    lm.tokenizer.chat_template = TEMPLATE
    lm.save(folder)


def plain_beside(folder: Path) -> Path:
    """Return where the model lies without a chat template."""
    return folder.with_name("plain")


# ------------------------------------------------------------------------------------------------------------- clients


async def in_turn(own: Served, clients: int, tasks: Sequence[Task]) -> list[Any]:
    """Have so many clients do tasks, each the next one that is left; return what they found, in the tasks' order."""
    found: list[Any] = [None] * len(tasks)
    left = iter(enumerate(tasks))
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=own.url, timeout=600, limits=limits) as client:

        async def work() -> None:
            for number, task in left:
                found[number] = await task(client)

        await asyncio.gather(*(work() for _ in range(clients)))
    return found


async def chat(client: httpx.AsyncClient, model: str, text: str, tokens: int, **fields: Any) -> tuple[str, list[float]]:
    """Have an answer streamed; return it, and the seconds until each of its pieces since the one before."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "stream": True, "temperature": 0,
            "max_tokens": tokens, **fields}  # fmt: skip
    parts, gaps, last = [], [], time.perf_counter()
    # A connection for each chat: one that a server has closed meanwhile would be an error of the next.
    headers = {"Connection": "close"}
    async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            content = _content(line)
            if content:
                parts.append(content)
                now = time.perf_counter()
                gaps.append(now - last)
                last = now
    return "".join(parts), gaps


def _content(line: str) -> str:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return ""
    choices = json.loads(line[6:]).get("choices") or [{}]
    return choices[0].get("delta", {}).get("content") or ""


async def embed(client: httpx.AsyncClient, model: str, text: str) -> list[float]:
    """Have a text embedded."""
    answer = await client.post("/v1/embeddings", json={"model": model, "input": [text]})
    answer.raise_for_status()
    vector: list[float] = answer.json()["data"][0]["embedding"]
    return vector


if __name__ == "__main__":
    run_llama_cpp(json.loads(sys.argv[1]))
