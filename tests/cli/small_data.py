"""A folder of evaluation data, small enough for a tiny model."""

import json
from pathlib import Path

from tests.evaluation.made_up import fruits, write_classification

_WORDS = ("a cat", "the rain", "an inn", "the end", "a thin man", "the sea", "in the tin", "another day")


def write_data(folder: Path) -> Path:
    """Write sentence pairs, a collection, labelled texts and a corpus."""
    (folder / "sts").mkdir(parents=True)
    for split, shift in (("test", 1), ("dev", 2)):
        rows = [f"{i % 6}\t{one}\t{_WORDS[(i * shift + i % 6) % 8]}" for i, one in enumerate(_WORDS)]
        (folder / "sts" / f"small.{split}.tsv").write_text("\n".join(rows) + "\n")
    collection = folder / "retrieval" / "small"
    (collection / "qrels").mkdir(parents=True)
    documents = [{"_id": f"d{i}", "title": "", "text": f"{text} and more"} for i, text in enumerate(_WORDS)]
    queries = [{"_id": f"q{i}", "text": text} for i, text in enumerate(_WORDS[:4])]
    for name, rows in (("corpus", documents), ("queries", queries)):
        (collection / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    judged = "".join(f"q{i}\td{i}\t1\n" for i in range(4))
    (collection / "qrels" / "test.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}")
    write_classification(folder, "fruit", train=fruits(12), valid=fruits(4, 12), test=fruits(5, 20))
    (folder / "lm").mkdir()
    text = "The cat sat in the rain. It was the end of another day. The man went to the inn. " * 12
    (folder / "lm" / "small.test.jsonl").write_text(json.dumps({"title": "one", "text": text}) + "\n")
    return folder
