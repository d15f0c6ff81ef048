"""A folder of made-up documents: each about one thing, with a title and sentences that share long phrases."""

import json
import random
from pathlib import Path

THINGS = "bridge river castle garden engine harbour violin orchard lantern quarry".split()  # noqa: SIM905
KINDS = "old stone wooden northern famous little hidden iron painted royal".split()  # noqa: SIM905


def documents(count: int = 70, *, titles: bool = True) -> list[dict[str, str]]:
    """Return so many documents; no two have the same text."""
    found = []
    for number in range(count):
        rng = random.Random(number)
        name = f"{KINDS[number % 10]} {THINGS[number // 10 % 10]} of {chr(65 + number % 26)}{number}ton"
        years = rng.sample(range(1500, 1990), 4)
        lines = [f"The {name} {rng.choice(['was drawn', 'was moved', 'was sold'])} in {year}." for year in years]
        others = [f"Nobody at the {name} remembers {rng.choice(THINGS)} number {rng.randint(100, 999)}."]
        row = {"id": f"d{number}", "text": " ".join([f"It all began in {years[0]} with {name}.", *lines, *others])}
        found.append(row | ({"title": name.title()} if titles else {}))
    return found


def write(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
