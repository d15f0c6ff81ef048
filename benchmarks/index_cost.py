"""What an index costs: how quickly it is made and answers, in how much memory, and how soon a kept document answers.

    python benchmarks/index_cost.py [--tables making,asking,memory,first-token] [--chunks 10000,100000,1000000]

`making`: documents a second, beside sentence-transformers and LanceDB with the same weights, plan and chunks.

`asking`: time and memory of one query to an index of random vectors, and which part of the nearest ten it finds. The
index is made in one process and asked in another.

`memory`: indexing, searching and generating answers with one model, and with a second one as the encoder, of its size
or of all-MiniLM-L6-v2's; beside a process that imports the same libraries and does nothing.

`first-token`: a document of 512 tokens and a question of 32, to the first token of the answer: all of it read, the
document kept in memory, and kept on the disk. What an index finds is measured by `index.py`.
"""

import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gerund
import harness
from gerund import Chunking, Document, Session
from gerund.jobs.engine import peak_resident_mib
from gerund.retrieval.documents import Chunk
from gerund.retrieval.hybrid_search import DEPTH
from gerund.retrieval.lance_store import TERMS, LanceStore
from gerund.retrieval.store import IndexMetadata, KeywordQuery
from inputs import demo_texts, random_llama, save, size_of
from results import Column, Table, median_of

PEER = "sentence-transformers + LanceDB"
IMPORTED, ONE, TWO = "the libraries, imported", "one model", "one model, and another of its size as encoder"
MINI = "one model, and one of all-MiniLM-L6-v2's size as encoder"
FRESH, IN_MEMORY, ON_DISK = "everything read", "document kept in memory", "document kept on the disk"
_BLOCK = 20_000


def making(options: Any) -> Table:
    """Time indexing, with the embedding of the same chunks by sentence-transformers as the peer."""
    import lancedb
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    texts = demo_texts(8 * options.making)
    documents = [Document(f"d{row}", " ".join(texts[8 * row : 8 * row + 8])) for row in range(options.making)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6}
        save(random_llama(**sizes, num_key_value_heads=6), folder / "model")
        lm = gerund.load(folder / "model", attention="causal", dtype="float32", max_length=512)
        body = Transformer(str(folder / "model"), max_seq_length=512)
        peer = SentenceTransformer(modules=[body, Pooling(384, "mean")], device="cpu")
        count = 0

        def ours(late: bool) -> list[str]:
            nonlocal count
            count += 1
            index = gerund.open_index(folder / f"{count}.index", lm, chunking=Chunking(late=late))
            index.add_documents(documents)
            return [one.text for one in index.store.chunks_of([document.source for document in documents])]

        chunks = ours(False)

        def theirs() -> None:
            nonlocal count
            count += 1
            vectors = peer.encode(chunks, normalize_embeddings=True)
            rows = [{"text": text, "vector": vector} for text, vector in zip(chunks, vectors, strict=True)]
            table = lancedb.connect(folder / f"{count}.lance").create_table("chunks", rows)
            table.create_index("text", config=lancedb.index.FTS())

        theirs()
        difference = harness.largest_difference(
            peer.encode(chunks[:32], normalize_embeddings=True), lm.encode(chunks[:32])
        )
        check = harness.require("largest difference of the vectors", difference, 1e-4)
        systems = {PEER: theirs, "gerund, early": lambda: ours(False), "gerund, late": lambda: ours(True)}
        rounds = harness.alternate(systems, options.rounds)
    caption = (
        f"Making an index of {len(documents)} documents ({len(chunks)} chunks of at most "
        f"{Chunking().tokens} tokens), a random 6-layer "
        "Llama of width 384; the peer is given the chunks, ours cuts them too."
    )
    return rounds.table("making", caption, base=PEER, checks=[check])


def asking(options: Any) -> Table:
    """Time queries to many chunks, and compare what is found with a comparison of every vector."""
    rows = []
    for size in [int(one) for one in options.chunks.split(",")]:
        with tempfile.TemporaryDirectory() as folder:
            case = {"folder": folder, "size": size, "width": options.width, "queries": options.queries_timed}
            made = harness.in_child(__file__, {**case, "kind": "build"})
            asked = harness.in_child(__file__, {**case, "kind": "ask", "rounds": options.rounds})
        for system in ("words", "vectors"):
            own = {"recall": asked["recall"]} if system == "vectors" else {}
            rows.append(
                {
                    "system": system, "chunks": size, "index": asked[f"{system} index"],
                    "cpu": median_of(asked[system]),
                    **own, "tidied": made["tidied"], "disk": made["disk"], "memory": asked["memory"],
                }
            )  # fmt: skip
    columns = [
        Column("system", "search"), Column("chunks", "chunks"), Column("index", "index"),
        Column("cpu", "processor time a query", "ms", 1), Column("recall", "recall@10", "", 3),
        Column("tidied", "putting into shape", "s", 1), Column("disk", "on the disk", "MiB", 0),
        Column("memory", "peak resident size", "MiB", 0),
    ]  # fmt: skip
    caption = (
        f"One query for {DEPTH} chunks, random vectors of {options.width} numbers around 100 centres, in a "
        "process that only asks."
    )
    return Table("asking", caption, columns, rows)


def build(case: dict[str, Any]) -> dict[str, Any]:
    """Make an index of random vectors, which are kept beside it."""
    rng = np.random.default_rng(0)
    words = [f"word{number}" for number in range(5000)]
    size, width, folder = case["size"], case["width"], Path(case["folder"])
    centres_CD = rng.normal(size=(100, width)).astype(np.float32)
    vectors_ND = np.lib.format.open_memmap(folder / "vectors.npy", "w+", np.float32, (size, width))
    store = LanceStore(folder / "my.index")
    store.create(IndexMetadata("fingerprint", "random", width, "", Chunking()))
    for first in range(0, size, _BLOCK):
        own = range(first, min(first + _BLOCK, size))
        block_ND = centres_CD[rng.integers(100, size=len(own))] + rng.standard_normal((len(own), width), np.float32)
        block_ND /= np.linalg.norm(block_ND, axis=1, keepdims=True)
        vectors_ND[first : own.stop] = block_ND
        numbers_NW = rng.zipf(1.3, size=(len(own), 40)) % 5000
        texts = [" ".join(words[number] for number in row) for row in numbers_NW]
        chunks = [_chunk(row, text) for row, text in zip(own, texts, strict=True)]
        store.replace([one.source for one in chunks], chunks, block_ND)
    begin = time.perf_counter()
    store.tidy()
    tidied = time.perf_counter() - begin
    disk = sum(path.stat().st_size for path in (folder / "my.index").rglob("*") if path.is_file()) / 2**20
    return {"tidied": tidied, "disk": disk}


def ask(case: dict[str, Any]) -> dict[str, Any]:
    """Ask an index that another process has made."""
    vectors_ND = np.load(Path(case["folder"]) / "vectors.npy", mmap_mode="r")
    store = LanceStore(Path(case["folder"]) / "my.index")
    rng = np.random.default_rng(1)
    queries_QD = np.array(vectors_ND[np.sort(rng.integers(case["size"], size=case["queries"]))])
    queries_QD = queries_QD + 0.5 * rng.normal(size=queries_QD.shape).astype(np.float32) / case["width"] ** 0.5
    queries_QD /= np.linalg.norm(queries_QD, axis=1, keepdims=True)

    def by_words() -> None:
        for number in range(case["queries"]):
            store.words(KeywordQuery(f"word{number % 50} word{number % 500} word{number}"), DEPTH)

    def by_vectors() -> None:
        for query_D in queries_QD:
            store.vectors(query_D, DEPTH)

    by_words()
    by_vectors()
    rounds = harness.alternate({"words": by_words, "vectors": by_vectors}, case["rounds"])
    memory = peak_resident_mib()
    found = [{chunk.source for chunk, _ in store.vectors(query_D, 10)} for query_D in queries_QD]
    wanted = _nearest(vectors_ND, queries_QD)
    recall = float(np.mean([len(one & other) / 10 for one, other in zip(found, wanted, strict=True)]))
    kinds = {column: one.index_type for one in _indices(store) for column in one.columns}
    scale = 1000 / case["queries"]
    return {
        "recall": recall, "memory": memory, "words index": kinds[TERMS],
        "vectors index": kinds.get("vector", "none: every vector"),
        **{name: [one.cpu * scale for one in rounds.spent[name]] for name in ("words", "vectors")},
    }  # fmt: skip


def _indices(store: LanceStore) -> Any:
    return store._table(store._require_current()).list_indices()


def _nearest(vectors_ND: np.ndarray, queries_QD: np.ndarray) -> list[set[str]]:
    """Return the ten nearest of all vectors to each query."""
    best: list[list[tuple[float, int]]] = [[] for _ in queries_QD]
    for first in range(0, len(vectors_ND), _BLOCK):
        scores_QN = queries_QD @ np.asarray(vectors_ND[first : first + _BLOCK]).T
        for own, scores_N in zip(best, scores_QN, strict=True):
            top = np.argsort(-scores_N)[:10]
            own[:] = sorted([*own, *((float(scores_N[one]), first + int(one)) for one in top)], reverse=True)[:10]
    return [{f"d{row}" for _, row in own} for own in best]


def _chunk(row: int, text: str) -> Chunk:
    return Chunk(f"d{row}", 0, len(text), text, 0, 40, "", "", "", "")


def memory(options: Any) -> Table:
    """Measure indexing, searching and asking in one process."""
    with tempfile.TemporaryDirectory() as name:
        folders = {one: Path(name) / str(place) for place, one in enumerate((ONE, TWO, MINI))}
        model, small = random_llama(**_sizes(options)), random_llama(**_small_sizes(options))
        for system, folder in folders.items():
            save(small if system == MINI else model, folder)
        peaks: dict[str, list[float]] = {IMPORTED: [], ONE: [], MINI: [], TWO: []}
        for _ in range(options.rounds):
            for system, found in peaks.items():
                own = [] if system == IMPORTED else list(dict.fromkeys([str(folders[ONE]), str(folders[system])]))
                case = {"kind": "memory", "folders": own, "documents": options.remembered}
                found.append(harness.in_child(__file__, case)["memory"])
    rows = []
    for system, found in peaks.items():
        above = [own - base for own, base in zip(found, peaks[IMPORTED], strict=True)]
        ratios = [own / base for own, base in zip(found, peaks[ONE], strict=True)]
        more = {} if system == IMPORTED else {"above": median_of(above), "ratio": median_of(ratios)}
        rows.append({"system": system, "memory": median_of(found), **more})
    columns = [
        Column("system", "in memory"), Column("memory", "peak resident size", "MiB", 0),
        Column("above", "above the libraries", "MiB", 0), Column("ratio", "ratio to one model", "", 2),
    ]  # fmt: skip
    caption = (
        f"Indexing {options.remembered} documents, searching and generating an answer; random Llamas of "
        f"{options.layers} layers and width {options.hidden} ({size_of(model):.0f} MiB of weights in float32), and for "
        f"all-MiniLM-L6-v2 one of {size_of(small):.0f} MiB."
    )
    return Table("memory", caption, columns, rows)


def remember(case: dict[str, Any]) -> dict[str, Any]:
    """Index, search and ask with one model, or with one for each; without any, import what that takes."""
    if not case["folders"]:
        importlib.import_module("gerund.language_model")
        importlib.import_module("gerund.retrieval.answer_generation")
        return {"memory": peak_resident_mib()}
    settings = {"attention": "causal", "dtype": "float32", "device": "cpu", "max_length": 512}
    texts = demo_texts(8 * case["documents"])
    writer, *others = [gerund.load(one, **settings) for one in case["folders"]]
    encoder = others[0] if others else writer
    index = gerund.open_index(None, encoder)
    index.add_documents(
        [Document(f"d{row}", " ".join(texts[8 * row : 8 * row + 8])) for row in range(case["documents"])]
    )  # fmt: skip
    question = texts[0]
    if writer is encoder:
        index.ask(question, method="generate", max_new_tokens=32)
    else:
        listed = "\n\n".join(f"[{hit.rank}]\n{hit.text}" for hit in index.search(question, 8))
        writer.generate(f"{listed}\n\nQuestion: {question}\nAnswer:", 32)
    return {"memory": peak_resident_mib()}


def first_token(options: Any) -> Table:
    """Time a question about a document up to the first token of the answer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = random_llama(**_sizes(options))
        save(model, folder / "model")
        lm = gerund.load(folder / "model", attention="causal", dtype="float32", device="cpu")
        rng = np.random.default_rng(0)
        document, question = (rng.integers(300, 2000, size=size).tolist() for size in (512, 32))
        session = lm.prefill(document)
        session.save(folder / "kept")
        whole = [*document, *question]
        systems = {
            FRESH: lambda: lm.prefill(whole),
            IN_MEMORY: lambda: session.prefill(question),
            ON_DISK: lambda: Session.load(folder / "kept", lm).prefill(question),
        }
        logits = {name: system()._logits_BV for name, system in systems.items()}
        spread = float(logits[FRESH].std())
        apart = harness.largest_difference(logits[FRESH], logits[ON_DISK]) / spread
        from_disk = harness.largest_difference(logits[IN_MEMORY], logits[ON_DISK])
        checks = [
            harness.require("logits, disk against memory", from_disk, 0),
            harness.require("logits, kept against read, in their standard deviations", apart, 1e-3),
        ]  # fmt: skip
        texts = {name: system().generate(32).token_ids for name, system in systems.items()}
        if len({tuple(ids) for ids in texts.values()}) > 1:
            raise harness.NotTheSame("what is written behind them differs")
        checks.append("32 tokens written behind each are the same")
        rounds = harness.alternate(systems, options.rounds)
        size = session.n_bytes / 2**20
    caption = (
        f"512 tokens of a document and 32 of a question, up to the logits of the answer's first token; a random Llama "
        f"of {size_of(model) / 4 * 2**20 / 1e6:.0f} million parameters in float32; {size:.1f} MiB are kept."
    )
    return rounds.table("first-token", caption, base=FRESH, checks=checks)


def _sizes(options: Any) -> dict[str, int]:
    sizes = {
        "hidden_size": options.hidden,
        "intermediate_size": 8 * options.hidden // 3,
        "num_hidden_layers": options.layers,
    }
    return {**sizes, "num_attention_heads": options.hidden // 64, "num_key_value_heads": max(1, options.hidden // 192)}


def _small_sizes(options: Any) -> dict[str, int]:
    """Return sizes whose weights take about what those of all-MiniLM-L6-v2 take, 87 MiB."""
    hidden = min(384, options.hidden)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": min(6, options.layers)}
    return {**sizes, "num_attention_heads": hidden // 32, "num_key_value_heads": hidden // 32}


CHILDREN = {"build": build, "ask": ask, "memory": remember}


def main(argv: list[str] | None = None) -> None:
    """Measure what is asked for."""
    parser = harness.parser(__doc__, rounds=5)
    parser.add_argument("--tables", default="making,asking,memory,first-token")
    parser.add_argument("--making", type=int, default=500, help="documents that are indexed (%(default)s)")
    parser.add_argument("--chunks", default="10000,100000", help="sizes of the index that is asked (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="numbers in a vector that is asked for (%(default)s)")
    parser.add_argument("--queries-timed", type=int, default=50)
    parser.add_argument("--hidden", type=int, default=768, help="width for `memory` and `first-token` (%(default)s)")
    parser.add_argument("--layers", type=int, default=12, help="layers for both (%(default)s)")
    parser.add_argument("--remembered", type=int, default=100, help="documents for `memory` (%(default)s)")
    small = {"making": 6, "chunks": "300", "queries_timed": 3, "width": 16}
    small |= {"hidden": 64, "layers": 2, "remembered": 2}
    options = harness.parse(parser, argv, quick=small)
    torch.set_num_threads(options.threads)
    if options.child is not None:
        harness.answer(CHILDREN[options.child["kind"]](options.child))
        return
    makers = {"making": making, "asking": asking, "memory": memory, "first-token": first_token}
    tables = [makers[name](options) for name in options.tables.split(",")]
    harness.report(options, __file__, tables, libraries=("lancedb", "sentence-transformers"))


if __name__ == "__main__":
    main()
