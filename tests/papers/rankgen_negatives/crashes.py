"""Kills a run that makes negatives before each of its steps on the disk, and looks what resuming makes of it.

Run as a process of its own, without threads. Prints how many runs were killed; any difference to the uninterrupted run
is an AssertionError.
"""

import json
import sys
from pathlib import Path

from gerund.papers.rankgen_negatives import NegativesConfig, make_negatives
from tests.jobs.crashes import contents, killed_before

CONFIG = NegativesConfig(prefix_words=12, fewest_words=3, most_words=9, generate=0.0, per_document=2, part_documents=1)


def run(books: Path, folder: Path) -> None:
    make_negatives([books], folder, CONFIG, resume=True, show=False)


def main(folder: Path) -> int:
    books = folder / "books.jsonl"
    sentences = [" ".join([f"W{i}", *(["a"] * (1 + i % 5)), "in."]) for i in range(60)]
    books.write_text("".join(json.dumps({"text": " ".join(sentences[i : i + 20])}) + "\n" for i in (0, 20, 40)))
    assert not killed_before(-1, lambda: run(books, folder / "whole"))
    expected = contents(folder / "whole")
    assert set(expected) == {"negatives.json", *(f"part-0000{number}.jsonl" for number in range(3))}
    for step in range(1000):
        output = folder / f"at-{step}"
        if not killed_before(step, lambda output=output: run(books, output)):
            return step
        # The second run is killed a little later than the first, the third goes through.
        if killed_before(step // 2 + 3, lambda output=output: run(books, output)):
            assert not killed_before(-1, lambda output=output: run(books, output))
        assert contents(output) == expected, step
    raise AssertionError("it never finishes")


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
