"""A server under load: whether every answer is right, and what it costs beside other servers with the same weights.

    python benchmarks/serve.py [--tables correct,latency,chat,llama,embeddings,mix,memory] [--requests 400] [--rounds 3]

`correct`: mixed requests of many clients, a tenth of which go away in the midst; each answer is compared with the
library's own, and the server's memory is read before and after.

`gguf-correct`: the same with a quantized file, without infilling. Only with `--gguf FILE`.

`latency`: what a request takes by the clock, one after the other on one kept connection.

`chat`: streamed chats of 1 and 8 clients, beside `transformers serve` with and without its continuous batching.

`llama`: the same chats, beside llama.cpp's server with the same weights as GGUF, in float32 and bfloat16.

`llama-large`: the same with 292 million random parameters, fewer and shorter chats.

`gguf`: chats with the same quantized file, beside llama.cpp's server; and the most memory that both held, where
gerund's embeds and re-ranks too. Only with `--gguf FILE`.

`embeddings`: requests of one text by 32 clients, beside sentence-transformers behind FastAPI.

`mix`: 2 clients that chat while 6 embed, and each of them alone; tokens, texts and the gaps between two pieces of a
text.

`memory`: the peak of one server that chats, embeds and re-ranks, beside the sum of two peers that chat and embed.

Each server is a process of its own; all stay up, and are asked in turn. Processor time is that of the server's
process, from the operating system. The model is the bundled one's base, read causally, with a chat template.
"""

import asyncio
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import harness
from gerund import Sampling
from harness import Rounds, Spent
from inputs import bundled_tokenizer, demo_texts, random_llama
from results import Column, Row, Table, median_of
from servers import (
    BATCHING,
    FASTAPI,
    LLAMA,
    LLAMA_HALF,
    OURS,
    OURS_HALF,
    TRANSFORMERS,
    Served,
    Task,
    chat,
    embed,
    fastapi,
    in_turn,
    infinity,
    llama_cpp,
    ours,
    ours_as_it_comes,
    plain_beside,
    run_fastapi,
    save_both,
    save_plain,
    transformers,
)

_KINDS = ("chat", "stream", "sampled", "embedding", "rerank")
_CHATS = 8
_CHAT_ALONE, _EMBED_ALONE = "chats alone", "embedding alone"
_TYPES = "in float32 where nothing else is said"


def correct(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Compare every answer under load with the library's own."""
    return [_compared(options, "correct", ours(folder), lm, (*_KINDS, "infill"))]


def correct_files(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Compare every answer under load of a quantized file with the library's own."""
    from gerund.light_entry import load

    del folder, lm
    return [
        _compared(options, f"gguf-correct, {file.name}", ours_as_it_comes(file), load(file), _KINDS)
        for file in options.gguf or ()
    ]


def _compared(options: Any, name: str, serves: Any, lm: Any, kinds: Sequence[str]) -> Table:
    texts = demo_texts(24)
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
    with serves as server:
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
    return Table(name, caption, columns, rows)


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


def latency(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Send small requests one after the other on a kept connection."""
    del lm
    text = " ".join(demo_texts(1)[0].split()[:6])
    writes = {"prompt": text, "max_tokens": 8, "temperature": 0}
    asked: dict[str, tuple[str, str, Any]] = {
        "/health": ("GET", "/health", None),
        "/tokenize": ("POST", "/tokenize", {"prompt": text}),
        "/v1/embeddings, 6 words": ("POST", "/v1/embeddings", {"input": text}),
        "/v1/completions, 8 tokens": ("POST", "/v1/completions", writes),
        "/v1/completions, 8 tokens, streamed": ("POST", "/v1/completions", {**writes, "stream": True}),
    }
    rows: list[Row] = []
    with ours(folder) as own, httpx.Client(base_url=own.url, timeout=600) as client:
        for name, (method, route, body) in asked.items():
            client.request(method, route, json=body).raise_for_status()
            cpu, took = own.cpu(), []
            for _ in range(options.requests):
                began = time.perf_counter()
                client.request(method, route, json=body).raise_for_status()
                took.append(1000 * (time.perf_counter() - began))
            cpu = 1000 * (own.cpu() - cpu) / options.requests
            rows.append(
                {"request": name, "median": float(np.median(took)), "most": float(np.quantile(took, 0.9)), "cpu": cpu}
            )
    columns = [
        Column("request", "request"), Column("median", "median", "ms", 1),
        Column("most", "nine in ten at most", "ms", 1), Column("cpu", "processor time of the server", "ms", 1),
    ]  # fmt: skip
    caption = (
        f"{options.requests} requests of each kind by one client, one after the other on one connection that is kept; "
        "the bundled model's base in float32. Time by the clock, with the client's own."
    )
    return [Table("latency", caption, columns, rows)]


def chats(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Stream chats from servers in turn."""
    with ExitStack() as stack:
        servers = [
            stack.enter_context(transformers(folder, name=TRANSFORMERS)),
            stack.enter_context(transformers(folder, "--continuous-batching", name=BATCHING)),
            stack.enter_context(ours(folder)),
        ]
        rows, checks = _streamed(options, lm, servers, TRANSFORMERS)
    return [_chat_table("chat", "the bundled model's base in float32", options, TRANSFORMERS, rows, checks)]


def beside_llama_cpp(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Stream the same chats from llama.cpp's server and ours, each in two types."""
    rows, checks = _beside_llama_cpp(options, folder, lm, _CHATS)
    return [_chat_table("llama", f"the bundled model's base {_TYPES}", options, LLAMA, rows, checks)]


def larger_beside_llama_cpp(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Stream chats of a larger model, whose weights no cache holds."""
    import gerund

    del lm
    large = folder.parent / "large" / "model"
    parameters, _ = _enlarged(large)
    # A quarter of the tokens, of a quarter of the chats: a token costs forty times as much.
    fewer = Namespace(**{**vars(options), "tokens": max(options.tokens // 4, 2)})
    rows, checks = _beside_llama_cpp(fewer, large, gerund.load(large, attention="causal", dtype="float32"), _CHATS // 4)
    model = f"a model of {parameters} million random parameters {_TYPES}"
    return [_chat_table("llama-large", model, fewer, LLAMA, rows, checks, _CHATS // 4)]


def _beside_llama_cpp(options: Any, folder: Path, lm: Any, chats: int) -> tuple[list[Row], list[str]]:
    import gerund

    half = gerund.load(folder, attention="causal", dtype="bfloat16")
    files = {LLAMA: folder.with_name("float32"), LLAMA_HALF: folder.with_name("bfloat16")}
    for own, place in zip((lm, half), files.values(), strict=True):
        own.export(place, "gguf")
    context = lm.model.config.max_position_embeddings
    with ExitStack() as stack:
        servers = [
            *(stack.enter_context(llama_cpp(place / "model.gguf", 8, context, name)) for name, place in files.items()),
            stack.enter_context(ours(folder)),
            stack.enter_context(ours(folder, "--dtype", "bfloat16", name=OURS_HALF)),
        ]
        return _streamed(options, lm, servers, LLAMA, chats)


def same_files(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Stream chats from llama.cpp's server and ours of the same GGUF files, then let ours embed and re-rank."""
    del folder, lm
    rows: list[Row] = []
    peaks: list[Row] = []
    for file in options.gguf or ():
        with ExitStack() as stack:
            peer = stack.enter_context(llama_cpp(file, 8, 2048, LLAMA))
            own = stack.enter_context(ours_as_it_comes(file))
            rows += [{"file": file.name, **row} for row in _answers_of_files(options, [peer, own])]
            held = [(LLAMA, "chat", peer.peak()), (OURS, "chat", own.peak())]
            texts = demo_texts(40)
            passages = [" ".join(texts[at : at + 3]) for at in range(len(texts) - 3)]
            asyncio.run(_everything(own, texts[:16], passages, ("chat", "embed", "rerank"), options.tokens))
            held.append((OURS, "chat, embed, rerank", own.peak()))
        peaks += [{"file": file.name, "system": name, "jobs": jobs, "peak": peak} for name, jobs, peak in held]
    if not rows:
        return []
    columns = [
        Column("file", "file"),
        *harness.time_columns(
            LLAMA, Column("clients", "clients"),
            Column("rate", "tokens a second of processor time", "", 0, "higher"),
            Column("alike", "of the answers the same from their start", "%", 0),
        ),
    ]  # fmt: skip
    caption = (
        f"Streamed greedy chats of {options.tokens} tokens, whatever ends them before, each with a text of its own; "
        "prompts included, processor time of the server's process. The two round activations differently, so their "
        "texts part sooner or later."
    )
    memory_columns = [
        Column("file", "file"), Column("system", "system"), Column("jobs", "asked to"),
        Column("peak", "peak resident size", "MiB", 0, "lower"),
    ]  # fmt: skip
    memory_caption = "The most memory that these servers held, mapped files included."
    return [Table("gguf", caption, columns, rows), Table("gguf-memory", memory_caption, memory_columns, peaks)]


def _answers_of_files(options: Any, servers: list[Served]) -> Iterator[Row]:
    """Load two servers of one file in turn with chats of equal lengths; yield what they spent."""
    loads = {1: _CHATS // 2, 8: 2 * _CHATS}
    texts = iter(demo_texts(options.rounds * sum(loads.values())))
    for clients, count in loads.items():
        asked = [list(islice(texts, count)) for _ in range(options.rounds)]

        def ask(own: Served, number: int, clients: int = clients, asked: list[list[str]] = asked) -> Awaitable[Any]:
            return in_turn(own, clients, _chats(own, asked[number], options.tokens, ignore_eos=True))

        rounds, answers = _alternated(servers, options.rounds, ask)
        pairs = zip(*([text for text, _ in answers[own.name]] for own in servers), strict=True)
        alike = [_common(*pair) / max(map(len, pair)) for pair in pairs]
        for row in rounds.rows(servers[0].name, clients=clients):
            rate = median_of([count * options.tokens / each.cpu for each in rounds.spent[str(row["system"])]])
            yield {**row, "rate": rate, "alike": 100 * float(np.mean(alike))}


def _common(left: str, right: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def _streamed(
    options: Any, lm: Any, servers: list[Served], base: str, chats: int = _CHATS
) -> tuple[list[Row], list[str]]:
    """Compare what servers write with what the library writes, then measure; return rows and what was compared."""
    # A text of its own for every chat and round: servers keep what they read of a prompt for the next like it.
    loads = {1: chats, 8: 2 * _CHATS}
    texts = demo_texts(chats + options.rounds * sum(loads.values()))
    expected = [lm.chat([{"role": "user", "content": text}], options.tokens)[0] for text in texts]
    rows: list[Row] = []
    alike, failed = {}, []
    for own in list(servers):
        try:
            found = asyncio.run(in_turn(own, 1, _chats(own, texts[:chats], options.tokens)))
        except httpx.HTTPError as error:
            servers.remove(own)
            failed.append(f"{own.name} is left out: it answers a streamed chat by {type(error).__name__}")
            continue
        alike[own.name] = sum(text == one.text for (text, _), one in zip(found, expected[:chats], strict=True))
    if alike[OURS] < chats:
        raise harness.NotTheSame(f"{OURS}: {alike[OURS]} of {chats} texts are the library's")
    first = chats
    for clients, count in loads.items():
        parts = [slice(first + number * count, first + (number + 1) * count) for number in range(options.rounds)]
        first = parts[-1].stop

        def ask(own: Served, number: int, clients: int = clients, parts: Sequence[slice] = parts) -> Awaitable[Any]:
            return in_turn(own, clients, _chats(own, texts[parts[number]], options.tokens))

        rounds, gaps = _alternated(servers, options.rounds, ask)
        tokens = [sum(one.usage.completion_tokens for one in expected[part]) for part in parts]
        for row in rounds.rows(base, clients=clients):
            name = str(row["system"])
            rate = median_of([own / one.cpu for own, one in zip(tokens, rounds.spent[name], strict=True)])
            waits = [gap for _, own in gaps[name] for gap in own]
            rows.append({**row, "rate": rate, "gap": 1000 * float(np.median(waits)) if waits else None})
    same = "; ".join(f"{name} {count} of {chats}" for name, count in alike.items())
    return rows, [f"texts equal to the library's: {same}", *failed]


def _chat_table(
    id_: str, model: str, options: Any, base: str, rows: list[Row], checks: list[str], chats: int = _CHATS
) -> Table:
    columns = harness.time_columns(
        base, Column("clients", "clients"),
        Column("rate", "tokens a second of processor time", "", 0, "higher"),
        Column("gap", "median gap between pieces", "ms", 1),
    )  # fmt: skip
    caption = (
        f"Streamed greedy chats of {options.tokens} tokens, {model}, "
        f"{chats} by one client and {2 * _CHATS} by eight, each with a text of its own; processor time of the server's "
        "process."
    )
    return Table(id_, caption, columns, rows, checks=checks)


def _chats(own: Served, texts: Sequence[str], tokens: int, **fields: Any) -> list[Task]:
    return [lambda client, text=text: chat(client, own.model, text, tokens, **fields) for text in texts]


def _alternated(
    servers: Sequence[Served], rounds: int, load: Callable[[Served, int], Awaitable[Any]]
) -> tuple[Rounds, dict[str, list[Any]]]:
    """Load servers in turn, in reversed order every second round; return what they spent and what was found."""
    spent: dict[str, list[Spent]] = {own.name: [] for own in servers}
    found: dict[str, list[Any]] = {own.name: [] for own in servers}
    for number in range(rounds):
        for own in list(servers)[:: -1 if number % 2 else 1]:
            seconds, answers = own.spend(lambda own, number=number: load(own, number))
            spent[own.name].append(seconds)
            found[own.name] += answers
    return Rounds(spent), found


def embeddings(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Have one text a request embedded by many clients."""
    words = " ".join(demo_texts(60)).split()
    sets = {
        "6 words": [" ".join(words[at : at + 6]) for at in range(options.texts)],
        "60 words": [" ".join(words[at : at + 60]) for at in range(options.texts // 2)],
    }
    rows: list[Row] = []
    with ExitStack() as stack:
        plain = plain_beside(folder)
        peers = [fastapi(plain, lm.dimensions), *([infinity(options.infinity, plain)] if options.infinity else [])]
        servers = [stack.enter_context(one) for one in (*peers, ours(folder))]
        probe = sets["60 words"][:8]
        vectors = [asyncio.run(in_turn(own, 4, _embeds(own, probe))) for own in servers]
        difference = max(harness.largest_difference(own, lm.encode(probe)) for own in vectors)
        check = harness.require("largest difference of the vectors", difference, 1e-4)
        for name, texts in sets.items():

            def load(own: Served, _: int, texts: Sequence[str] = texts) -> Awaitable[Any]:
                return in_turn(own, options.clients, _embeds(own, texts))

            rounds, _ = _alternated(servers, options.rounds, load)
            for row in rounds.rows(FASTAPI, texts=name):
                rate = median_of([len(texts) / one.cpu for one in rounds.spent[str(row["system"])]])
                rows.append({**row, "rate": rate})
    columns = harness.time_columns(
        FASTAPI, Column("texts", "texts"), Column("rate", "texts a second of processor time", "", 0, "higher")
    )
    caption = (
        f"{options.texts} short and {options.texts // 2} long texts, one a request, by {options.clients} clients; the "
        "bundled model's base in float32, read causally with the mean of the states."
    )
    return [Table("embeddings", caption, columns, rows, checks=[check])]


def _embeds(own: Served, texts: Sequence[str]) -> list[Task]:
    return [lambda client, text=text: embed(client, own.model, text) for text in texts]


def mix(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Chat while others embed, under several ratios of the time."""
    del lm
    texts, rows = demo_texts(40), []
    with ExitStack() as stack:
        servers = [
            stack.enter_context(ours(folder, "--decode-ratio", ratio, name=f"writing ratio {ratio}"))
            for ratio in ("0.3", "1", "3")
        ]
        loads = {own.name: (own, 2, 6) for own in servers}
        loads |= {_CHAT_ALONE: (servers[1], 2, 0), _EMBED_ALONE: (servers[1], 0, 6)}
        found: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
        for number in range(options.rounds):
            for name in list(loads)[:: -1 if number % 2 else 1]:
                own, writers, readers = loads[name]
                _, answers = own.spend(lambda own, w=writers, r=readers: _mixed(own, texts, options, w, r))
                found[name].append(answers)
    alone = {"tokens": found[_CHAT_ALONE], "texts": found[_EMBED_ALONE]}
    for name, rounds in found.items():
        cells = {key: median_of([one[key] for one in rounds]) for key in rounds[0] if rounds[0][key]}
        if name in (own.name for own in servers):
            for key, others in alone.items():
                cells[f"{key}_kept"] = median_of(
                    [one[key] / other[key] for one, other in zip(rounds, others, strict=True)]
                )
        rows.append({"system": name, **cells})
    columns = [
        Column("system", "time of writing for each second of reading"),
        Column("tokens", "tokens a second", "", 1), Column("tokens_kept", "of the rate alone", "", 2, "higher"),
        Column("texts", "texts a second", "", 1), Column("texts_kept", "of the rate alone", "", 2, "higher"),
        Column("gap", "median gap between pieces", "ms", 1), Column("worst", "greatest gap", "ms", 0),
    ]  # fmt: skip
    caption = (
        f"2 clients chat ({options.tokens} tokens an answer) while 6 embed one text of about 60 words a request, for "
        f"{options.seconds:g} s by the clock; tokens are counted as pieces of the streams."
    )
    return [Table("mix", caption, columns, rows)]


async def _mixed(own: Served, texts: Sequence[str], options: Any, writers: int, readers: int) -> dict[str, float]:
    gaps: list[float] = []
    done = [0]
    ends = time.perf_counter() + options.seconds
    passages = [" ".join(texts[at : at + 5]) for at in range(len(texts) - 5)]
    async with httpx.AsyncClient(base_url=own.url, timeout=600) as client:

        async def writes(number: int) -> None:
            while time.perf_counter() < ends:
                # The first gap is the wait for the prompt to be read.
                gaps.extend((await chat(client, own.model, texts[number], options.tokens))[1][1:])

        async def reads(number: int) -> None:
            while time.perf_counter() < ends:
                await embed(client, own.model, passages[(done[0] + number) % len(passages)])
                done[0] += 1

        began = time.perf_counter()
        await asyncio.gather(
            *(writes(number) for number in range(writers)), *(reads(number) for number in range(readers))
        )
        seconds = time.perf_counter() - began
    return {
        "tokens": len(gaps) / seconds,
        "texts": done[0] / seconds,
        "gap": 1000 * float(np.median(gaps)) if gaps else 0.0,
        "worst": 1000 * max(gaps, default=0.0),
    }


def memory(options: Any, folder: Path, lm: Any) -> list[Table]:
    """Load one server with everything, and two peers with a part of it each; compare what they held at most."""
    texts = demo_texts(40)
    passages = [" ".join(texts[at : at + 5]) for at in range(len(texts) - 5)]
    large = folder.parent / "large" / "model"
    jobs = {TRANSFORMERS: ("chat",), FASTAPI: ("embed",), OURS: ("chat", "embed", "rerank")}
    rows: list[Row] = []
    for place, (parameters, width) in {folder: _size(lm), large: _enlarged(large)}.items():
        peaks: dict[str, list[float]] = {name: [] for name in jobs}
        for _ in range(options.rounds):
            for server in (
                transformers(place, name=TRANSFORMERS),
                fastapi(plain_beside(place), width),
                ours(place),
            ):
                with server as own:
                    asyncio.run(_everything(own, texts[:16], passages, jobs[own.name], options.tokens))
                    peaks[own.name].append(own.peak())
        ratios = [own / (one + other) for one, other, own in zip(*peaks.values(), strict=True)]
        for name, found in peaks.items():
            row = {"parameters": parameters, "system": name, "jobs": ", ".join(jobs[name]), "peak": median_of(found)}
            rows.append({**row, "ratio": median_of(ratios) if name == OURS else None})
    columns = [
        Column("parameters", "million parameters"), Column("system", "system"), Column("jobs", "asked to"),
        Column("peak", "peak resident size", "MiB", 0), Column("ratio", "times both peers together", "", 2, "lower"),
    ]  # fmt: skip
    caption = (
        f"The most memory that servers held: 16 chats of {options.tokens} tokens by 8 clients while 32 embed "
        f"{len(passages)} passages, which then are re-ranked, in float32. The smaller model is the bundled one's base; "
        "the larger has random weights."
    )
    return [Table("memory", caption, columns, rows)]


def _size(lm: Any) -> tuple[int, int]:
    """Return a model's parameters in millions, and its width."""
    return round(sum(weight.numel() for weight in lm.model.parameters()) / 1e6), lm.dimensions


def _enlarged(folder: Path) -> tuple[int, int]:
    """Save a model of the same kind with random weights, more layers and wider ones; return its size."""
    import gerund

    model = random_llama(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=8,
        tie_word_embeddings=True,
    )  # fmt: skip
    large = gerund.LanguageModel(model, bundled_tokenizer(), gerund.EncoderConfig(gerund.AttentionPlan("causal")))
    save_both(large, folder)
    return _size(large)


async def _everything(
    own: Served, texts: Sequence[str], passages: Sequence[str], jobs: Sequence[str], tokens: int
) -> None:
    """Have a server do what it is asked to, chats and embeddings side by side."""
    work = [in_turn(own, 8, _chats(own, texts, tokens))] if "chat" in jobs else []
    work += [in_turn(own, 32, _embeds(own, passages))] if "embed" in jobs else []
    await asyncio.gather(*work)
    if "rerank" in jobs:
        async with httpx.AsyncClient(base_url=own.url, timeout=600) as client:
            answer = await client.post("/v2/rerank", json={"query": texts[0], "documents": list(passages)})
            answer.raise_for_status()


TABLES = {
    "correct": correct, "latency": latency, "chat": chats, "llama": beside_llama_cpp,
    "llama-large": larger_beside_llama_cpp, "gguf": same_files, "gguf-correct": correct_files,
    "embeddings": embeddings, "mix": mix, "memory": memory,
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = harness.parser(__doc__)
    parser.add_argument("--tables", default=",".join(TABLES), help="which of them, with commas")
    parser.add_argument(
        "--requests", type=int, default=400, help="of the table `correct`, and of each kind in `latency`"
    )
    parser.add_argument("--clients", type=int, default=32, help="at a time, in `correct` and `embeddings`")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    parser.add_argument("--texts", type=int, default=256, help="of the table `embeddings`")
    parser.add_argument("--infinity", help="the program infinity_emb, for the table `embeddings`")
    parser.add_argument("--gguf", type=Path, action="append", help="a GGUF file for the table `gguf`; may be repeated")
    parser.add_argument("--seconds", type=float, default=8, help="of a round of the table `mix`")
    quick = {"tables": "correct", "requests": 24, "clients": 8, "tokens": 8, "texts": 8, "seconds": 1}
    options = harness.parse(parser, argv, quick=quick)
    if options.child is not None:
        run_fastapi(options.child)
        return
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "model"
        lm = save_plain(folder)
        tables = [
            table for name, make in TABLES.items() if name in options.tables.split(",")
            for table in make(options, folder, lm)
        ]  # fmt: skip
    harness.report(options, __file__, tables, libraries=["fastapi", "uvicorn", "sentence-transformers", "xllamacpp"])


if __name__ == "__main__":
    main()
