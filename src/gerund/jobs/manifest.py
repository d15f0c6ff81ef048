"""What a job is: everything that determines its result, as JSON beside its parts.

Two runs belong together exactly when their manifests have the same key. What things are called is kept for messages
and does not count, so that an input or a model may move between two runs.

Knows: settings by name, digests. Does not know: where manifests are kept, what the settings mean.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gerund.errors import DataError

FORMAT = 2
# A hash of a model's weights and configuration: no name to show to anybody.
FINGERPRINT = "fingerprint"


@dataclass(frozen=True)
class Manifest:
    """What a job is.

    Attributes:
        kind: which command's job, such as ``embed``.
        settings: what determines the result, by name; values are JSON, nested by one level at most.
        inputs: a digest of the content of all that is read.
        inputs_name: what messages call that, such as ``the rows of notes.txt``.
        names: what else is called how, such as ``model``; does not count.
        stage: how far the job is; does not count.
        facts: what else is to be kept; does not count.
    """

    kind: str
    settings: Mapping[str, Any]
    inputs: str
    inputs_name: str
    names: Mapping[str, str] = field(default_factory=dict)
    stage: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """A hash of all that determines the result: 16 hexadecimal digits."""
        content = json.dumps([self.kind, self.inputs, self._flat()], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()

    def changed(self, earlier: "Manifest") -> list[str]:
        """Return the names of the settings that differ from an earlier manifest's; ``inputs`` where these do."""
        old, new = earlier._flat(), self._flat()
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        return names + (["inputs"] if earlier.inputs != self.inputs else [])

    def difference(self, earlier: "Manifest") -> str:
        """Say what differs from an earlier manifest, with both values; "" where nothing does."""
        if earlier.kind != self.kind:
            return f"it was begun by '{earlier.kind}'"
        old, new, changed = earlier._flat(), self._flat(), self.changed(earlier)
        told = [
            f"{name} was {old.get(name)!r} and is {new.get(name)!r}"
            for name in changed
            if name not in (FINGERPRINT, "inputs")
        ]
        if FINGERPRINT in changed and not told:
            was, now = (names.names.get("model") for names in (earlier, self))
            told.append(f"the model was {was} and is {now}, with other weights or settings")
        if "inputs" in changed:
            told.append(f"{earlier.inputs_name} have changed")
        return ", ".join(told)

    def to_json(self) -> str:
        """Return the manifest as JSON."""
        content = {
            "format": FORMAT,
            "kind": self.kind,
            "stage": self.stage,
            "settings": dict(self.settings),
            "inputs": self.inputs,
            "inputs_name": self.inputs_name,
            "names": dict(self.names),
            "facts": dict(self.facts),
        }
        return json.dumps(content, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, path: Path) -> "Manifest | None":
        """Return the manifest of a file; None where there is none, or one of another version of gerund."""
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if content.pop("format") != FORMAT:
                return None
            return cls(**content)
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
            return None

    def _flat(self) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        # What was read from a file and what was not shall compare: JSON has no tuples.
        for name, value in json.loads(json.dumps(dict(self.settings))).items():
            if isinstance(value, dict):
                flat |= {f"{name}.{inner}": it for inner, it in value.items()}
            else:
                flat[name] = value
        return flat


class InputFiles:
    """Files that a job reads, with a digest of their names and contents, taken when this is made.

    Raises:
        DataError: one of them cannot be read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)
        self._states = [_state(path) for path in self.files]
        self.digest = self._digest()

    def changed(self) -> bool:
        """Tell whether a file has another content by now; one whose size and time are the same is not read again."""
        return [_state(path) for path in self.files] != self._states and self._digest() != self.digest

    def _digest(self) -> str:
        found = [[path.name, digest_of_file(path)] for path in self.files]
        return hashlib.blake2b(json.dumps(found).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def digest_of_file(path: Path) -> str:
    """Return a hash of a file's content, read a piece at a time.

    Raises:
        DataError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _state(path: Path) -> tuple[int, int]:
    try:
        state = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    return state.st_size, state.st_mtime_ns
