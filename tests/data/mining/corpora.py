"""Small corpora to mine, and how the tests mine them."""

import json
import random
from pathlib import Path

import pyarrow.parquet as pq

from gerund.data.mining import MiningConfig, mine

# A few documents a part.
SMALL = MiningConfig(part_size=2000)

# fmt: off
WORDS = (
    "river", "bridge", "station", "harbour", "council", "library", "railway", "museum", "orchestra",
    "festival", "cathedral", "mountain", "valley", "castle", "garden", "kingdom", "emperor", "treaty",
    "battle", "regiment", "novel", "painter", "composer", "theatre", "garrison", "harvest", "fishery",
)
# fmt: on


def articles(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return documents whose sentences sometimes share their title's words or one another's."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        subject = " ".join(draw.sample(WORDS, 2))
        sentences = [f"The {subject} is known since {1000 + number}."]
        for _ in range(draw.randint(0, 9)):
            rest = " ".join(draw.choices(WORDS, k=draw.randint(2, 7)))
            sentences.append(f"The {subject} has a {rest}." if draw.random() < 0.4 else f"Nearby, {rest} was seen.")
        found.append({"title": f"The {subject}", "text": " ".join(sentences)})
    return found


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def run(corpus, output, config=SMALL, **more):
    return mine([corpus] if not isinstance(corpus, list) else corpus, output, config, workers=1, show=False, **more)


def rows(output):
    if output.suffix == ".parquet":
        return pq.read_table(output).to_pylist()
    return [json.loads(line) for line in output.read_text().splitlines()]
