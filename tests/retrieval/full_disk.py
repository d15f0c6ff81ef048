"""Writes into an index until the disk is full, and looks what is left; run as a process of its own.

    python -m tests.retrieval.full_disk FOLDER

The folder has to lie on a disk of a few MiB. Prints the error; whatever was stored before has to be there still.
"""

import sys
from pathlib import Path

from gerund.errors import GerundError
from gerund.retrieval.documents import Document
from gerund.retrieval.lance_store import LanceStore
from tests.retrieval.helpers import ABOUT, cut_lines, embed


def main(folder: Path) -> None:
    """Fill the disk."""
    store = LanceStore(folder / "my.index")
    store.create(ABOUT)
    stored = []
    try:
        for number in range(1000):
            # Without two equal lines, so that nothing gets smaller on the disk.
            text = "\n".join(f"{number * 1000 + line:x} {hash((number, line)):x}" for line in range(1000))
            chunks = cut_lines(Document(f"d{number}", text))
            store.replace([f"d{number}"], chunks, embed([chunks]))
            stored.append(f"d{number}")
    except GerundError as error:
        print(f"{type(error).__name__}: {error}")
    assert stored, "the disk was full at once"
    again = LanceStore(folder / "my.index")
    assert sorted(again.documents()) == sorted(stored)
    assert again.count() == 1000 * len(stored)
    assert again.vectors(embed([chunks])[0], 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
