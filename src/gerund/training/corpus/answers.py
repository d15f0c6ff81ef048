"""Generate a model's answers to texts, cached on disk so that an interrupted job can resume.

Each file is named by a hash of the model and of its texts: no model answers the same texts twice.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gerund.data.files import checked_text, field_of
from gerund.data.tables import json_lines
from gerund.errors import DataError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.generation import generate
from gerund.jobs.files import write_atomic
from gerund.models.fingerprint import weights_hash
from gerund.progress import progress
from gerund.training.corpus.teachers import key_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_AT_ONCE = 64


@dataclass(frozen=True)
class Answer:
    """What a model answers to a text."""

    text: str
    is_whole: bool = True  # whether it came to its end


def read_texts(paths: Sequence[Path]) -> list[tuple[str, Answer | None]]:
    """Read .jsonl files, whose lines have ``text``, and ``answer`` where it is given."""
    rows: list[tuple[str, Answer | None]] = []
    for path in paths:
        for where, row in json_lines(path):
            field_of(row, "text", where)
            fields = [checked_text(row[name], where, name) for name in ("text", "answer") if name in row]
            if not all(text.strip() for text in fields):
                raise DataError(f"{where}: text and answer may not be empty; leave answer out for the model's own")
            rows.append((fields[0], Answer(fields[1]) if len(fields) > 1 else None))
    if not rows:
        raise DataError(f"{', '.join(map(str, paths))}: no texts in there")
    return rows


def model_answers(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str],
    most_tokens: int,
    folder: Path,
    report: Callable[[str], None] = lambda _: None,
) -> list[Answer]:
    """Return the greedy answers of a model: as a chat where it has a template for one, else what continues a text."""
    stretches = [texts[first : first + _AT_ONCE] for first in range(0, len(texts), _AT_ONCE)]
    identity = f"{weights_hash(model.state_dict())} {most_tokens} {tokenizer.chat_template}"
    paths = [folder / f"{key_of(identity, stretch)}.jsonl" for stretch in stretches]
    missing = {path: stretch for path, stretch in zip(paths, stretches, strict=True) if not path.is_file()}
    if missing:
        folder.mkdir(parents=True, exist_ok=True)
        count = sum(map(len, missing.values()))
        report(f"the model answers {count:,} texts, in at most {most_tokens} tokens each")
        with progress(count, "answering", show=None) as advance:
            for path, stretch in missing.items():
                lines = map(_line, _written(model, tokenizer, stretch, most_tokens))
                write_atomic(path, "".join(lines), apart=True)
                advance(len(stretch))
    texts_of_paths = "".join(path.read_text("utf-8") for path in paths)
    return [Answer(**json.loads(line)) for line in texts_of_paths.split("\n") if line]


def _line(answer: Answer) -> str:
    return json.dumps(asdict(answer), ensure_ascii=False) + "\n"


def _written(model: Any, tokenizer: Any, texts: Sequence[str], most_tokens: int) -> list[Answer]:
    prompts: list[Any] = list(texts)
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": text}] for text in texts]
    results = generate(model, tokenizer, prompts, GenerationConfig.of(most_tokens, None, {}))
    return [Answer(result.text.strip(), result.finished) for result in results]
