"""Search a folder of text files: embed every paragraph once, then answer questions.

    python examples/search.py FOLDER "where do swallows nest" [--model MODEL]

The vectors are kept in FOLDER/.vectors.npz together with the encoder's fingerprint, so that the second search starts
at once, and vectors of another encoder are never mixed in.
"""

import argparse
import hashlib
from pathlib import Path

import numpy as np

import gerund


def paragraphs(folder: Path) -> list[tuple[str, str]]:
    """Return file name and text of every paragraph."""
    found = []
    for path in sorted(folder.glob("**/*.txt")):
        for text in path.read_text(encoding="utf-8").split("\n\n"):
            if text.strip():
                found.append((path.name, " ".join(text.split())))
    return found


def vectors(lm: gerund.LanguageModel, texts: list[str], kept: Path) -> np.ndarray:
    """Return the texts' vectors: the kept ones if texts and encoder are the same, else new ones."""
    digest = hashlib.blake2b("\0".join(texts).encode(), digest_size=8).hexdigest()
    key = f"{lm.fingerprint()} {digest}"
    if kept.is_file():
        with np.load(kept) as store:
            if str(store["key"]) == key:
                return store["vectors"]
    made = lm.encode(texts)
    np.savez(kept, vectors=made, key=np.array(key))
    return made


def main() -> None:
    """Read the command line and print the five best paragraphs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("question")
    parser.add_argument("--model", help="a folder or hub id; left out, the bundled model")
    arguments = parser.parse_args()
    found = paragraphs(arguments.folder)
    if not found:
        raise SystemExit(f"{arguments.folder} has no .txt file with text in it")
    lm = gerund.load(arguments.model)
    matrix = vectors(lm, [text for _, text in found], arguments.folder / ".vectors.npz")
    scores = lm.similarity(arguments.question, matrix)[0]
    for place in np.argsort(-scores)[:5]:
        name, text = found[place]
        print(f"{scores[place]:.3f}  {name}: {text[:100]}")


if __name__ == "__main__":
    main()
