"""What one model costs, and what the libraries and models cost that it stands in for, on the same task.

    python benchmarks/stack.py --data ../shared/data [--outside ./all-MiniLM-L6-v2] [--documents 400] [--rounds 2]

The task: documents of Cranfield are indexed, searched by words and vectors, the first 20 chunks of some queries are
put into a new order, and some queries are answered in writing from five chunks.

gerund does it with one model. The peer is one program of sentence-transformers (an encoder and a cross-encoder),
LanceDB and llama.cpp (through xllamacpp), as their manuals use them, and all in one process, which spares it memory.
With the same weights it encodes and writes by exports of gerund's base; with `--outside` it encodes by that folder.
Trained weights of a cross-encoder are not needed for its cost: random ones of the size of
ms-marco-MiniLM-L-6-v2 stand in, so its order means nothing here.

Each system runs in a process of its own, in turn: `stages` has the time of each step, `parts` the memory and the disk.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

import harness
from gerund.jobs.engine import peak_resident_mib
from harness import Rounds, Spent
from results import Column, Row, Table, median_of

SAME, LOADED = "gerund, base in float32", "gerund, bundled model as loaded"
PEER, OUTSIDE = "the peer, same base in float32", "the peer, encoder all-MiniLM-L6-v2"
NAMES = {"peer": PEER, "outside": OUTSIDE, "same": SAME, "loaded": LOADED}
STAGES = ("start", "index", "search", "re-rank", "answer")
_HITS, _RERANKED, _SOURCES = 10, 20, 5
_CONTEXT = 1024
# A prompt may run into a near tie of two tokens, and go on differently from there.
_FEWEST_ALIKE = 0.75


@dataclass(frozen=True)
class Work:
    """What every system does; written once, so that all do the same.

    Attributes:
        documents: of them each has `id` and `text`.
        chunks: their texts, cut by gerund; the peer is given them, gerund cuts its own, the same ones.
        queries: what is searched.
        candidates: queries with the chunks that are put into an order.
        prompts: what is continued.
        tokens: by how many tokens.
    """

    documents: list[dict[str, str]]
    chunks: list[str]
    queries: list[str]
    candidates: list[tuple[str, list[str]]]
    prompts: list[str]
    tokens: int


class System(Protocol):
    """What does the work, a step a method."""

    def index(self) -> None:
        """Make an index of the documents."""

    def search(self) -> None:
        """Ask all queries."""

    def rerank(self) -> None:
        """Put candidates into a new order."""

    def write(self) -> list[str]:
        """Return the prompts' continuations."""


class Ours:
    """gerund: one model for all of it."""

    def __init__(self, case: dict[str, Any], work: Work, folder: Path) -> None:
        import gerund

        self.gerund, self.work = gerund, work
        self.lm = gerund.load(case["model"], **case["how"])
        self.opened = gerund.open_index(folder / "my.index", self.lm)

    def index(self) -> None:
        """Cut, embed and store."""
        self.opened.add_documents([self.gerund.Document(one["id"], one["text"]) for one in self.work.documents])

    def search(self) -> None:
        """Ask one query after the other."""
        for query in self.work.queries:
            self.opened.search(query, _HITS)

    def rerank(self) -> None:
        """Order by how probable the query is behind a chunk, what `search(rerank=...)` does by default."""
        for query, texts in self.work.candidates:
            self.lm.rerank(query, texts, by="likelihood")

    def write(self) -> list[str]:
        """Continue the prompts; what they begin with is read once, as `ask` does and llama.cpp too."""
        from gerund.retrieval.answer_generation import common_start

        ids = [self.lm.tokenizer(one)["input_ids"] for one in self.work.prompts]
        common = common_start(ids[0], ids[-1]) if len(ids) > 1 else ids[0][:1]
        begun = self.lm.prefill(common)
        return [begun.prefill(one[len(common) :]).generate(self.work.tokens).text for one in ids]

    def vectors(self, texts: Sequence[str]) -> Any:
        """Return what is compared."""
        return self.lm.encode(list(texts))


class Assembled:
    """sentence-transformers, LanceDB and llama.cpp: a model for each step."""

    def __init__(self, case: dict[str, Any], work: Work, folder: Path) -> None:
        import lancedb
        from sentence_transformers import CrossEncoder, SentenceTransformer

        self.work, self.lancedb = work, lancedb
        self.encoder = SentenceTransformer(case["encoder"], device="cpu")
        self.reranker = CrossEncoder(case["reranker"], device="cpu")
        self.writer = _llama(case["writer"], case["threads"])
        self.database = lancedb.connect(folder / "my.lance")

    def index(self) -> None:
        """Embed and store."""
        vectors = self.vectors(self.work.chunks)
        rows = [{"text": text, "vector": vector} for text, vector in zip(self.work.chunks, vectors, strict=True)]
        self.table = self.database.create_table("chunks", rows)
        self.table.create_index("text", config=self.lancedb.index.FTS())

    def search(self) -> None:
        """Ask one query after the other."""
        for query in self.work.queries:
            [vector] = self.vectors([query])
            self.table.search(query_type="hybrid").vector(vector).text(query).limit(_HITS).to_list()

    def rerank(self) -> None:
        """Order by the cross-encoder."""
        for query, texts in self.work.candidates:
            self.reranker.rank(query, texts, show_progress_bar=False)

    def write(self) -> list[str]:
        """Continue the prompts."""
        asked = {"max_tokens": self.work.tokens, "temperature": 0.0}
        found = [self.writer.handle_completions({**asked, "prompt": one}) for one in self.work.prompts]
        return [one["choices"][0]["text"] for one in found]

    def vectors(self, texts: Sequence[str]) -> Any:
        """Embed; sentence-transformers sorts by length and takes 32 at a time."""
        return self.encoder.encode(list(texts), normalize_embeddings=True, show_progress_bar=False)


def _llama(path: str, threads: int) -> Any:
    """Return llama.cpp as it comes, with this many threads and the model's context."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_gpu_layers = path, _CONTEXT, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.offline, params.ui, params.port, params.hostnames, params.verbosity = True, False, 0, ["127.0.0.1"], -1
    return xllamacpp.Server(params)


SYSTEMS: dict[str, Callable[[dict[str, Any], Work, Path], Any]] = {"ours": Ours, "assembled": Assembled}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Do the whole task in this process, and say what each step took."""
    work = Work(**json.loads(Path(case["work"]).read_text(encoding="utf-8")))
    with tempfile.TemporaryDirectory() as name:
        made: list[System] = []
        start = harness.spend(lambda: made.append(SYSTEMS[case["system"]](case, work, Path(name))))
        [own] = made
        steps = [own.index, own.search, own.rerank, own.write]
        stages = dict(zip(STAGES, [start, *map(harness.spend, steps)], strict=True))
    whole = {"cpu": sum(one.cpu for one in stages.values()), "wall": sum(one.wall for one in stages.values())}
    return {
        **whole,
        "stages": {name: [one.cpu, one.wall] for name, one in stages.items()},
        "memory": peak_resident_mib(),
    }


# ------------------------------------------------------------------------------------------------------------ prepared


def prepared(options: Any, folder: Path) -> tuple[Work, dict[str, dict[str, Any]]]:
    """Write the task and every model, and return it with what each system is started with."""
    import gerund

    base = gerund.load(adapter="none", attention="bidir", dtype="float32")
    base.save(folder / "base")
    base.export(folder / "encoder", "sentence-transformers")
    base.export(folder / "float32", "gguf")
    gerund.load(adapter="none", attention="causal").export(folder / "own", "gguf")
    save_reranker(options, folder / "reranker")
    work = the_work(options, base)
    (folder / "work.json").write_text(json.dumps(vars(work)), encoding="utf-8")
    every = {"work": str(folder / "work.json"), "threads": options.threads}
    peer = {**every, "system": "assembled", "reranker": str(folder / "reranker")}
    ours = {**every, "system": "ours"}
    cases = {
        PEER: {**peer, "encoder": str(folder / "encoder"), "writer": str(folder / "float32" / "model.gguf")},
        SAME: {**ours, "model": str(folder / "base"), "how": {"dtype": "float32"}},
        LOADED: {**ours, "model": None, "how": {}},
    }
    if options.outside is not None:
        # The writer in the type that the bundled weights have, as in `LOADED`.
        own = {"encoder": str(options.outside), "writer": str(folder / "own" / "model.gguf")}
        cases = {PEER: cases[PEER], OUTSIDE: {**peer, **own}, SAME: cases[SAME], LOADED: cases[LOADED]}
    return work, cases


def the_work(options: Any, base: Any) -> Work:
    """Take documents and queries of Cranfield; what is ordered and answered is what gerund finds by words."""
    import gerund
    from gerund.retrieval.answer_generation import Prompter
    from gerund.retrieval.question_answering import sources_of

    place = options.data / "retrieval" / "cranfield"
    documents = [{"id": one["_id"], "text": one["text"]} for one in _lines(place / "corpus.jsonl") if one["text"]]
    documents = documents[: options.documents]
    queries = [one["text"] for one in _lines(place / "queries.jsonl")][: options.queries]
    index = gerund.open_index(None, base)
    index.add_documents([gerund.Document(one["id"], one["text"]) for one in documents])
    hits = {query: index.search(query, _RERANKED, mode="words") for query in queries}
    prompter = Prompter(base.model, base.tokenizer)
    return Work(
        documents=documents,
        chunks=[one.text for one in index.store.chunks_of([one["id"] for one in documents])],
        queries=queries,
        candidates=[(query, [hit.text for hit in hits[query]]) for query in queries[: options.reranked]],
        prompts=[
            str(prompter.prompt(query, sources_of(hits[query][:_SOURCES]), ())) for query in queries[: options.answers]
        ],
        tokens=options.tokens,
    )


def _lines(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def save_reranker(options: Any, folder: Path) -> None:
    """Write a cross-encoder of random weights."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    from inputs import bundled_tokenizer

    tokenizer = bundled_tokenizer() if options.outside is None else AutoTokenizer.from_pretrained(options.outside)
    torch.manual_seed(0)
    width = options.reranker_width
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=4 * width, num_attention_heads=width // 32,
        num_hidden_layers=options.reranker_layers, num_labels=1, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def compare(work: Work, cases: dict[str, dict[str, Any]], folder: Path) -> list[str]:
    """Show that the same weights give the same vectors and texts in both.

    Raises:
        NotTheSame: they do not.
    """
    ours, theirs = Ours(cases[SAME], work, folder / "1"), Assembled(cases[PEER], work, folder / "2")
    texts = [*work.chunks[:64], *work.queries[:16]]
    difference = harness.largest_difference(ours.vectors(texts), theirs.vectors(texts))
    check = harness.require("largest difference of the vectors, same base", difference, 1e-4)
    alike = sum(one == other for one, other in zip(ours.write(), theirs.write(), strict=True))
    said = f"{alike} of {len(work.prompts)} answers of the same base are the same text"
    if alike < _FEWEST_ALIKE * len(work.prompts):
        raise harness.NotTheSame(f"the systems do not compute the same: {said}")
    return [check, said]


# -------------------------------------------------------------------------------------------------------------- tables


def stages(work: Work, found: dict[str, list[dict[str, Any]]], checks: list[str]) -> Table:
    """Return the table of times."""
    from gerund import Chunking

    rows: list[Row] = []
    for stage in (*STAGES, "all"):
        rounds = Rounds({name: [_spent(one, stage) for one in own] for name, own in found.items()})
        rows += [{"stage": stage, **row} for row in rounds.rows(PEER)]
    columns = [Column("stage", "step"), *harness.time_columns(PEER)]
    caption = (
        f"{len(work.documents)} documents of Cranfield in {len(work.chunks)} chunks of at most {Chunking().tokens} "
        f"tokens indexed, {len(work.queries)} searches by words and vectors, {len(work.candidates)} times {_RERANKED} "
        "chunks put into a new order (gerund: likelihood of the query; the peer: a cross-encoder), and "
        f"{len(work.prompts)} answers of at most {work.tokens} tokens from {_SOURCES} chunks each, one at a time."
    )
    return Table("stages", caption, columns, rows, checks=checks)


def _spent(one: dict[str, Any], stage: str) -> Spent:
    return Spent(one["cpu"], one["wall"]) if stage == "all" else Spent(*one["stages"][stage])


def parts(cases: dict[str, dict[str, Any]], found: dict[str, list[dict[str, Any]]]) -> Table:
    """Return the table of memory and disk."""
    rows: list[Row] = []
    for name, own in found.items():
        ours = cases[name]["system"] == "ours"
        roots = ["gerund[index]"] if ours else ["sentence-transformers", "lancedb", "xllamacpp"]
        packages = installed(roots)
        rows.append(
            {
                "system": name, "memory": median_of([one["memory"] for one in own]), "models": 1 if ours else 3,
                "weights": sum(path.stat().st_size for path in _weights(cases[name])) / 1e6,
                "named": len(roots), "packages": len(packages), "size": sum(map(_size, packages)) / 1e6,
            }
        )  # fmt: skip
    columns = [
        Column("system", "system"), Column("memory", "peak resident size", "MiB", 0), Column("models", "models"),
        Column("weights", "their weights on the disk", "MB", 0), Column("named", "packages that one installs"),
        Column("packages", "with all that they need"), Column("size", "these on the disk", "MB", 0),
    ]  # fmt: skip
    return Table("parts", "Memory of the processes of the table above, and what they need on the disk.", columns, rows)


def _weights(case: dict[str, Any]) -> list[Path]:
    if case["system"] == "ours":
        from gerund.models.sources import find

        return sorted(find(case["model"]).folder.rglob("*.safetensors"))
    folders = [Path(case["encoder"]), Path(case["reranker"])]
    return [*(path for folder in folders for path in sorted(folder.rglob("*.safetensors"))), Path(case["writer"])]


def installed(roots: Sequence[str]) -> list[metadata.Distribution]:
    """Return the installed packages that some need, themselves among them."""
    from packaging.requirements import Requirement

    found: dict[str, metadata.Distribution] = {}
    left, seen = [Requirement(one) for one in roots], set[str]()
    while left:
        wanted = left.pop()
        key = f"{wanted.name.lower().replace('_', '-')}{sorted(wanted.extras)}"
        if key in seen:
            continue
        seen.add(key)
        own = metadata.distribution(wanted.name)
        found[key.partition("[")[0]] = own
        for need in map(Requirement, own.requires or ()):
            if need.marker is None or any(need.marker.evaluate({"extra": one}) for one in ("", *wanted.extras)):
                left.append(need)
    return list(found.values())


def _size(package: metadata.Distribution) -> int:
    paths: Iterable[Path] = (Path(str(one.locate())) for one in package.files or ())
    if package.name == "gerund":  # perhaps a checkout, whose files it does not list; its weights have their own column
        import gerund

        paths = Path(gerund.__file__).parent.rglob("*.py")
    return sum(path.stat().st_size for path in paths if path.is_file())


def main(argv: list[str] | None = None) -> None:
    """Measure."""
    parser = harness.parser(__doc__, rounds=2)
    parser.add_argument("--data", type=Path, help="a folder with retrieval/cranfield, which has to be given")
    parser.add_argument("--outside", type=Path, help="a folder of sentence-transformers, all-MiniLM-L6-v2's")
    parser.add_argument("--systems", default=",".join(NAMES), help="which of them, with commas (%(default)s)")
    parser.add_argument("--documents", type=int, default=400, help="that are indexed (%(default)s)")
    parser.add_argument("--queries", type=int, default=200, help="that are searched (%(default)s)")
    parser.add_argument("--reranked", type=int, default=25, help="queries of these (%(default)s)")
    parser.add_argument("--answers", type=int, default=20, help="queries of these (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer (%(default)s)")
    parser.add_argument("--reranker-layers", type=int, default=6, help="of the cross-encoder (%(default)s)")
    parser.add_argument("--reranker-width", type=int, default=384, help="of the cross-encoder (%(default)s)")
    small = {"documents": 8, "queries": 2, "reranked": 1, "answers": 2, "tokens": 4}
    options = harness.parse(parser, argv, quick={**small, "reranker_layers": 1, "reranker_width": 32})
    if options.child is not None:
        harness.answer(run(options.child))
        return
    chosen = set(options.systems.split(","))
    if options.data is None:
        parser.error("--data is missing: a folder with retrieval/cranfield")
    if not {"peer"} <= chosen <= set(NAMES):
        parser.error(f"--systems are peer and others of {', '.join(NAMES)}")
    with tempfile.TemporaryDirectory() as name:
        work, cases = prepared(options, Path(name))
        checks = compare(work, cases, Path(name))
        cases = {name: cases[name] for key, name in NAMES.items() if key in chosen and name in cases}
        _, found = harness.alternate_children(__file__, cases, options.rounds)
        tables = [stages(work, found, checks), parts(cases, found)]
    harness.report(options, __file__, tables, libraries=("sentence-transformers", "lancedb", "xllamacpp"))


if __name__ == "__main__":
    main()
