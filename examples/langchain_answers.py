"""Answer a question from a folder of texts with LangChain: one model searches, ranks and writes.

    python examples/langchain_answers.py FOLDER "what is bread made of" [--model MODEL]

A model with a chat template chats; any other, such as the bundled one, continues a text.
"""

import argparse
from pathlib import Path

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import PromptTemplate
from langchain_core.runnables import RunnablePassthrough

import gerund
from gerund.integrations.langchain import ChatGerund, GerundLLM, GerundReranker, GerundRetriever

PROMPT = PromptTemplate.from_template("{context}\n\nQuestion: {question}\nAnswer:")


def main() -> None:
    """Read the command line, and print what was found and what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", help="a folder or hub id; left out, the bundled model")
    arguments = parser.parse_args()

    lm = gerund.load(arguments.model)
    index = gerund.open_index(None, lm)  # in memory; a folder's name keeps it
    index.add(arguments.folder)

    retriever = GerundRetriever(index=index, k=8)
    reranker = GerundReranker(lm=lm, top_n=2)

    def context(question: str) -> str:
        found = reranker.compress_documents(retriever.invoke(question), question)
        for document in found:
            print(f"{document.metadata['relevance_score']:.3f}  {document.metadata['source']}")
        return "\n\n".join(document.page_content for document in found)

    chats = bool(lm.tokenizer.chat_template)
    model = ChatGerund(lm=lm, max_tokens=40) if chats else GerundLLM(lm=lm, max_tokens=40, stop=["\n"])
    chain = {"context": context, "question": RunnablePassthrough()} | PROMPT | model | StrOutputParser()
    print(chain.invoke(arguments.question).strip())


if __name__ == "__main__":
    main()
