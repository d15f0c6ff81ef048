"""What the documentation shows of the benchmarks: one short table per section, chosen from the result files.

Knows: sections, tables, columns and rows. Does not know a single figure; `render.py` takes them from the files.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Headline:
    """One section of the documentation's page.

    Attributes:
        heading: as on the page of all tables, where it links to.
        text: what is compared, and what a reader should know of it.
        table: a table, as `file:id`.
        columns: keys of the columns that are shown.
        rows: numbers of the rows that are shown; all of them where it is empty.
    """

    heading: str
    text: str
    table: str
    columns: tuple[str, ...]
    rows: tuple[int, ...] = ()


HEADLINES = (
    Headline(
        "## The bundled model",
        "Held-out data. `base` is the same weights without adapters, causal, mean pooling. The bundled model has 15.7 "
        "million parameters and also generates; all-MiniLM-L6-v2 has 22.7 million and doesn't.",
        "quality:vectors",
        ("task", "base", "bundled", "bm25", "bundled + BM25", "peer"),
        (0, 5, 6, 7, 9, 12),
    ),
    Headline(
        "### Short and long prefixes",
        "200 continuations of 96 tokens from books: one nucleus sample, or the best of 20 by the trained scorer.",
        "decoding:prefix-lengths",
        ("prefix", "system", "mauve"),
    ),
    Headline(
        "### Another encoder's vectors",
        "A student aligned on a collection's documents searches vectors that its teacher made (Medline).",
        "alignment:alignment",
        ("queries", "documents", "ndcg", "ratio"),
        (7, 8, 10, 11, 13),
    ),
    Headline(
        "## One model or four",
        "Indexing, searching, re-ranking and answering over 400 documents. The peer is sentence-transformers, LanceDB "
        "and llama.cpp on the same weights.",
        "stack:stages",
        ("stage", "system", "cpu"),
        (20, 22, 23),
    ),
    Headline(
        "## Encoding",
        "2,000 texts, a six-layer Llama of width 384, one thread, the same weights. Most of the gain is less padding.",
        "encode:encode",
        ("system", "dtype", "padded", "ratio"),
        (0, 1, 2, 3),
    ),
    Headline(
        "## What a plan costs",
        "A forward pass with `mask0-bidir` in every layer, compared with the same mask in plain transformers.",
        "plan_overhead:overhead",
        ("batch", "overhead"),
    ),
    Headline(
        "## Memory",
        "Generating and encoding with one set of weights (480 MiB).",
        "memory:one-set-of-weights",
        ("system", "memory", "ratio"),
    ),
    Headline(
        "## The command line",
        "CPU seconds of whole processes with the bundled model; `before` is commit 30183cf.",
        "start_up:start-up",
        ("command", "version", "cpu"),
    ),
    Headline(
        "## Serving",
        "CPU time of `gerund serve` and llama.cpp's server on the bundled weights: streamed chats of 48 tokens. With "
        "100 million parameters and more in float32, llama.cpp generates several times as fast.",
        "serve:llama",
        ("clients", "system", "rate", "ratio"),
        (0, 2, 4, 6),
    ),
    Headline(
        "### Serving quantized files",
        "The same GGUF file in both servers, chats of 48 tokens, on a processor with AVX2 alone.",
        "serve:gguf",
        ("file", "clients", "system", "rate", "ratio"),
    ),
    Headline(
        "### Embedding requests",
        "One text per request, 32 clients.",
        "serve:embeddings",
        ("texts", "system", "rate", "ratio"),
    ),
    Headline(
        "### Latency",
        "One client, one connection, milliseconds of wall time.",
        "serve:latency",
        ("request", "median", "most"),
    ),
    Headline(
        "## Other runtimes",
        "96 texts with the same weights and plan.",
        "runtimes:encoders",
        ("system", "cosine", "ratio", "size"),
    ),
    Headline(
        "### Quantized files",
        "The network that runs quantized files, without sampler and tokenizer, and llama.cpp on the same file.",
        "packed:work",
        ("file", "work", "system", "rate", "ratio"),
    ),
    Headline(
        "## Choosing a plan",
        "Every k of a plan in one pass over the layers, compared with one run per k.",
        "sweep:all-k",
        ("plan", "layers", "ratio"),
        (1, 3, 5, 7),
    ),
    Headline(
        "## The papers' plans on two small models",
        "Untrained, 8.0 million parameters, each plan at its best k on STS-B dev. The order differs on real models.",
        "quality:plans-default",
        ("plan", "sts/stsb", "retrieval/medline", "classification/banking77"),
        (0, 1, 3, 5, 8, 11, 15),
    ),
    Headline(
        "### Recurrent layers read both ways",
        "A hybrid model (three of four layers recurrent) and an attention model of the same size, untrained.",
        "hybrids:untrained",
        ("base", "plan", "recurrent", "mean"),
        (0, 1, 13, 14, 15),
    ),
    Headline(
        "## Methods without training",
        "The bundled model's base; each method chosen on validation data.",
        "training_free:test-default",
        ("family", "sts", "retrieval", "clustering"),
        (0, 1, 3, 9, 11, 12),
    ),
    Headline(
        "## Evaluation",
        "MAUVE of 200 continuations of 64 tokens.",
        "quality-evaluation:writing",
        ("way", "corpus", "rep_4", "mauve"),
        (0, 1, 2, 3),
    ),
    Headline(
        "## Search",
        "nDCG@10 of an index on two collections that nothing was chosen on, whole documents.",
        "index:unseen",
        ("set", "encoder", "words", "vectors", "fused"),
        (0, 2, 4, 6),
    ),
    Headline(
        "### Answers from documents",
        "Extracted answers to SQuAD 2.0 questions over two articles, bundled model.",
        "quality:answers",
        ("questions", "contains", "citation_precision", "unanswerable"),
    ),
    Headline(
        "### What an index costs",
        "One query for 100 chunks, random vectors of 256 dimensions.",
        "index_cost:asking",
        ("system", "chunks", "cpu", "recall", "memory"),
        (2, 3, 4, 5),
    ),
    Headline(
        "### Documents ranked by relevance",
        "BM25's first 50 documents, re-ranked by the bundled model: no method beats BM25 on all three collections.",
        "relevance:relevance",
        ("collection", "by", "ndcg_at_10"),
        (0, 1, 3, 4, 5, 7, 8, 9, 11),
    ),
    Headline(
        "## Training for both",
        "Cross-entropy over 128,256 tokens without keeping the logits.",
        "vocabulary_loss:loss",
        ("system", "precision", "memory", "ratio"),
    ),
    Headline(
        "### Large contrastive batches",
        "A step on 512 pairs in chunks of 32, with cached gradients.",
        "cached_contrastive:step",
        ("system", "memory", "ratio"),
    ),
    Headline(
        "### What training brings",
        "100 steps of UniMAE and MNTP, three seeds.",
        "training:unimae",
        ("arm", "sts/stsb cosine_spearman", "retrieval/medline ndcg_at_10", "mean"),
        (0, 1, 3, 5, 6, 7),
    ),
    Headline(
        "## Guided generation",
        "RankGen's beam search: 2 beams, 10 samples, 115 tokens after 256, compared with the released code.",
        "guided_search:search",
        ("scored by", "every", "system", "ratio"),
        (1, 2, 4, 5, 7, 9),
    ),
    Headline(
        "## Engine",
        "Texts of 24 tokens by several callers at once, eight slots.",
        "engine:writing",
        ("writers", "dtype", "system", "ratio"),
        (3, 9),
    ),
    Headline(
        "## Scorers of continuations",
        "Finding the true continuation among eleven, on books and Wikipedia.",
        "scorers:scorers",
        ("scorer", "books 11-way", "wiki 11-way"),
        (0, 2, 3, 4, 8),
    ),
    Headline(
        "### Generation ranked by a scorer",
        "200 continuations of 96 tokens from books, bundled model.",
        "decoding:writing",
        ("system", "mauve", "rep_4"),
        (0, 1, 8, 11, 12),
    ),
    Headline(
        "## Mining pairs",
        "Pairs of sentences with a long common substring, compared with GUR's released code on whole documents.",
        "mining:documents",
        ("document", "ratio"),
        (1, 4, 7, 10),
    ),
    Headline(
        "## Bulk work",
        "20,000 short texts in processes and on Ray.",
        "bulk:embed",
        ("system", "workers", "rate", "ratio"),
    ),
    Headline(
        "## GUR",
        "Three seeds on the bundled model's first base: title retrieval, and intents by nearest label.",
        "gur:default",
        ("arm", "title-retrieval/wiki recall_at_100", "zero-shot/banking77", "perplexity"),
        (0, 1, 2, 3),
    ),
)
