"""JSON files of a model's folder, in the form in which transformers writes its own.

Knows: the form. Does not know: what they say.
"""

import json
from pathlib import Path
from typing import Any


def change_json(path: Path, **values: Any) -> None:
    """Set some fields of a JSON file."""
    data = json.loads(path.read_text(encoding="utf-8"))
    write_json(path, {**data, **values})


def write_json(path: Path, data: Any) -> None:
    """Write a JSON file as transformers writes its own."""
    path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
