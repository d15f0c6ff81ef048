"""Search a folder of texts with a Haystack pipeline: one model embeds documents and questions, and ranks.

python examples/haystack_search.py FOLDER "what is bread made of" [--model MODEL]
"""

import argparse
import os
from pathlib import Path

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")  # Haystack counts its users over the network otherwise

from haystack import Document, Pipeline
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

import gerund
from gerund.integrations.haystack import GerundDocumentEmbedder, GerundRanker, GerundTextEmbedder


def main() -> None:
    """Read the command line, and print the best paragraphs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", help="a folder or hub id; left out, the bundled model")
    arguments = parser.parse_args()

    documents = [
        Document(content=" ".join(paragraph.split()), meta={"file": path.name})
        for path in sorted(arguments.folder.glob("**/*.txt"))
        for paragraph in path.read_text(encoding="utf-8").split("\n\n")
        if paragraph.strip()
    ]
    if not documents:
        raise SystemExit(f"{arguments.folder} has no .txt file with text in it")
    lm = gerund.load(arguments.model)
    store = InMemoryDocumentStore()
    store.write_documents(GerundDocumentEmbedder(lm).run(documents)["documents"])

    pipeline = Pipeline()
    pipeline.add_component("embedder", GerundTextEmbedder(lm))
    pipeline.add_component("retriever", InMemoryEmbeddingRetriever(store, top_k=8))
    pipeline.add_component("ranker", GerundRanker(lm, top_k=3))
    pipeline.connect("embedder.embedding", "retriever.query_embedding")
    pipeline.connect("retriever.documents", "ranker.documents")
    found = pipeline.run({"embedder": {"text": arguments.question}, "ranker": {"query": arguments.question}})
    for document in found["ranker"]["documents"]:
        print(f"{document.score:.3f}  {document.meta['file']}: {document.content[:100]}")


if __name__ == "__main__":
    main()
