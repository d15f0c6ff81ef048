"""Answer a question from a folder of texts with LlamaIndex: one model embeds, ranks and writes.

    python examples/llama_index_answers.py FOLDER "what is bread made of" [--model MODEL]

LlamaIndex keeps the vectors here; gerund.integrations.llama_index.GerundRetriever searches an index of gerund's.
"""

import argparse
from pathlib import Path

from llama_index.core import Document, VectorStoreIndex

import gerund
from gerund.integrations.llama_index import GerundEmbedding, GerundLLM, GerundRerank


def main() -> None:
    """Read the command line, and print what was found and what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", help="a folder or hub id; left out, the bundled model")
    arguments = parser.parse_args()

    lm = gerund.load(arguments.model)
    documents = [
        Document(text=" ".join(paragraph.split()), metadata={"file": path.name})
        for path in sorted(arguments.folder.glob("**/*.txt"))
        for paragraph in path.read_text(encoding="utf-8").split("\n\n")
        if paragraph.strip()
    ]
    if not documents:
        raise SystemExit(f"{arguments.folder} has no .txt file with text in it")
    index = VectorStoreIndex.from_documents(documents, embed_model=GerundEmbedding(lm))
    engine = index.as_query_engine(
        similarity_top_k=8,
        llm=GerundLLM(lm, max_tokens=40, additional_kwargs={"stop": ["\n\n"]}),
        node_postprocessors=[GerundRerank(lm, top_n=2)],
    )
    answer = engine.query(arguments.question)
    for node in answer.source_nodes:
        print(f"{node.score:.3f}  {node.metadata['file']}")
    print(str(answer).strip())


if __name__ == "__main__":
    main()
