"""The table `correct` of serve.py: mixed requests of many clients, each answer compared with the library's own."""

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from gerund import Sampling
from inputs import demo_texts
from results import Column, Row, Table
from servers import chat, in_turn, ours


def correct(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Compare every answer under load with the library's own."""
    texts = demo_texts(24)
    kinds = ("chat", "stream", "sampled", "embedding", "rerank", "infill")
    expected = {(kind, number): _expected(lm, kind, texts, number) for kind in kinds for number in range(8)}
    rng = random.Random(0)
    plan = [(kinds[rng.randrange(len(kinds))], rng.randrange(8), rng.random() < 0.1)
            for _ in range(options.requests)]  # fmt: skip
    counts = {kind: {"sent": 0, "right": 0, "wrong": 0, "lost": 0, "gone": 0} for kind in kinds}

    async def one(client: httpx.AsyncClient, kind: str, number: int, goes: bool) -> None:
        own = counts[kind]
        own["sent"] += 1
        try:
            async with asyncio.timeout(rng.uniform(0.01, 0.3) if goes else 600):
                found = await _ask(client, kind, texts, number)
        except TimeoutError:
            own["gone"] += 1
            return
        except (httpx.HTTPError, KeyError, ValueError):
            own["lost"] += 1
            return
        own["right" if _same(kind, found, expected[kind, number]) else "wrong"] += 1

    memory = []
    with ours(folder) as server:
        for part in range(25):
            own = plan[part * len(plan) // 25 : (part + 1) * len(plan) // 25]
            asyncio.run(in_turn(server, options.clients, [lambda client, p=p: one(client, *p) for p in own]))
            memory.append(server.memory())
        health = httpx.get(f"{server.url}/health", timeout=10).json()
    rows: list[Row] = [{"kind": kind, **own} for kind, own in counts.items()]
    total = {key: sum(own[key] for own in counts.values()) for key in counts["chat"]}
    # It goes up and down by a few hundredths, so several readings of each fifth.
    first, last = sum(memory[:5]) / 5, sum(memory[-5:]) / 5
    rows.append(
        {"kind": "all", **total, "memory": last - first, "percent": 100 * (last / first - 1), "reference": True}
    )
    columns = [
        Column("kind", "request"), Column("sent", "sent"), Column("right", "right"), Column("wrong", "wrong"),
        Column("lost", "lost"), Column("gone", "given up by the client"),
        Column("memory", "growth of the server's memory from the first fifth to the last", "MiB", 1),
        Column("percent", "the same", "%", 1),
    ]  # fmt: skip
    caption = (
        f"{options.requests} mixed requests of {options.clients} clients, a tenth of which go away in the midst; each "
        f"answer is compared with the library's own. The engine's guarantee here: {health['guarantee']}."
    )
    return [Table("correct", caption, columns, rows)]


def _expected(lm: Any, kind: str, texts: Sequence[str], number: int) -> Any:
    messages, text = [{"role": "user", "content": texts[number]}], texts[number]
    if kind in ("chat", "stream"):
        return lm.chat(messages, 24)[0].text
    if kind == "sampled":
        return [one.text for one in lm.generate(text, 16, Sampling(temperature=0.9, top_p=0.9, seed=number), n=2)]
    if kind == "embedding":
        return lm.encode(texts[number : number + 4])
    if kind == "rerank":
        return lm.rerank(text, texts[8:16]).indices
    return lm.infill(f"{text} [blank] {texts[number + 8]}", lengths=[1, 2]).text


async def _ask(client: httpx.AsyncClient, kind: str, texts: Sequence[str], number: int) -> Any:
    text = texts[number]
    if kind == "stream":
        return (await chat(client, "model", text, 24))[0]
    routes: dict[str, tuple[str, dict[str, Any], Callable[[Any], Any]]] = {
        "chat": (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 24},
            lambda found: found["choices"][0]["message"]["content"],
        ),
        "sampled": (
            "/v1/completions",
            {"prompt": text, "temperature": 0.9, "top_p": 0.9, "seed": number, "max_tokens": 16, "n": 2},
            lambda found: [one["text"] for one in found["choices"]],
        ),
        "embedding": (
            "/v1/embeddings",
            {"input": texts[number : number + 4]},
            lambda found: np.float32([one["embedding"] for one in found["data"]]),
        ),
        "rerank": (
            "/v2/rerank",
            {"query": text, "documents": list(texts[8:16])},
            lambda found: [one["index"] for one in found["results"]],
        ),
        "infill": (
            "/infill",
            {"text": f"{text} [blank] {texts[number + 8]}", "lengths": [1, 2]},
            lambda found: found["text"],
        ),
    }
    route, body, read = routes[kind]
    answer = await client.post(route, json=body)
    answer.raise_for_status()
    return read(answer.json())


def _same(kind: str, found: Any, expected: Any) -> bool:
    return np.allclose(found, expected, atol=1e-5) if kind == "embedding" else bool(found == expected)
