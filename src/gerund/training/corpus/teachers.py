"""Teachers: encode training texts with another model, or let a model answer them, and store what they gave.

A teacher is a sentence-transformers model (folder or hub id), another model that gerund reads, or a Parquet file that
``gerund embed --keep-text`` wrote. Each shard is named by a hash of the teacher and of its texts: an interrupted job
continues with the next shard, no teacher reads the same texts twice, and shards are mapped into memory.
Answers are kept in the same way.
"""

import hashlib
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.attention.interface import cpu_has_bfloat16
from gerund.data.embedding.files import read_embeddings
from gerund.data.files import checked_text, field_of
from gerund.data.tables import json_lines
from gerund.entry import load
from gerund.errors import ConfigError, DataError, GerundError, MissingDependencyError, ModelError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.generation import generate
from gerund.jobs.files import atomic_file, write_atomic
from gerund.models.fingerprint import weights_hash
from gerund.models.loading import quiet, read_config, settings_folder
from gerund.models.sources import Source, find, looks_local
from gerund.models.weights import refuse_fetched_code
from gerund.progress import progress
from gerund.quantization import check_precision, restore
from gerund.settings.encoder import CONFIG_FILE, DEFAULT_MODEL

SHARD_TEXTS = 4096
_NAME = "vectors"
# Texts whose spread of lengths is small go through a model together.
_BATCH = 64


@dataclass
class GerundTeacher:
    """A model that gerund reads, with the encoder that it was saved with."""

    lm: Any
    name: str

    @property
    def space(self) -> str:
        """Its fingerprint, or the space that it declares itself."""
        return str(self.lm.space)

    @property
    def dimensions(self) -> int:
        """Numbers of a vector."""
        return int(self.lm.dimensions)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return its vectors, an over-long text cut at its end."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", r"\d+ of \d+ texts were longer than")
            vectors: np.ndarray = self.lm.encode(list(texts), normalize=True, show_progress=False)
        return vectors


class SentenceTransformersTeacher:
    """A model in sentence-transformers' format."""

    def __init__(self, name: str, prompt: str = "") -> None:
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise MissingDependencyError(
                "a teacher in sentence-transformers' format needs it: pip install 'gerund[st]'"
            ) from error
        self.name, self.prompt = name, prompt
        folder = Path(name) if Path(name).is_dir() else None
        if folder is not None or not looks_local(name):
            refuse_fetched_code(Source(name, folder))
        try:
            with quiet():
                self.model: Any = SentenceTransformer(
                    name, trust_remote_code=False, model_kwargs={"use_safetensors": True}
                )
        except Exception as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            if Path(name).is_file():
                reason = "it is a file; vectors of a teacher are read from a .parquet"
            elif not Path(name).exists():
                reason = f"there is no such folder; taken as a hub id: {reason.partition('. ')[0].partition(' (')[0]}"
            raise ModelError(f"the teacher {name} cannot be loaded: {reason}") from error
        # A hash of what its vectors depend on: weights, modules, and the prompt.
        modules = [type(module).__name__ for module in self.model]
        identity = json.dumps([weights_hash(self.model.state_dict()), modules, prompt])
        self.space = hashlib.blake2b(identity.encode(), digest_size=8).hexdigest()
        self.dimensions = int(self.model.get_embedding_dimension() or len(self.model.encode("a")))
        device = self.model.device.type
        if device == "cuda" or (device == "cpu" and cpu_has_bfloat16()):
            # Its vectors become targets: three digits are more than a student learns.
            self.model.bfloat16()

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Return its vectors, an over-long text cut at its end."""
        given = [f"{self.prompt}{text}" for text in texts]
        vectors = self.model.encode(given, batch_size=_BATCH, show_progress_bar=False, convert_to_tensor=True)
        result: np.ndarray = vectors.float().cpu().numpy()
        return result


Teacher = GerundTeacher | SentenceTransformersTeacher
"""Gives texts their vectors. ``space`` is equal for two whose vectors can be compared; messages have ``name``."""


def open_teacher(name: str, prompt: str = "") -> Teacher:
    """Return a teacher by its folder or hub id.

    A folder with ``gerund.json``, and ``default``, is a model that gerund reads; one with ``modules.json``, and a hub
    id that gerund cannot read, one in sentence-transformers' format.
    """
    folder = Path(name)
    if _is_gerunds(name):
        lm = load(name)
        if prompt:
            lm = load(lm.spec.model_copy(update={"prompt": prompt}))
        return GerundTeacher(lm, name)
    if name.startswith((".", "/", "~")) and not folder.is_dir():
        raise ModelError(f"the teacher {name} is not there: no such folder")
    return SentenceTransformersTeacher(name, prompt)


def _is_gerunds(name: str) -> bool:
    """Tell whether gerund reads a model: it has ``gerund.json``, or is no model of sentences and a decoder."""
    if name == DEFAULT_MODEL:
        return True
    folder = Path(name)
    if folder.is_dir():
        return (folder / CONFIG_FILE).is_file() or not (folder / "modules.json").is_file()
    try:
        source = find(name)
        if settings_folder(source) is not None:
            return True
        architectures = getattr(read_config(source), "architectures", None) or []
    except GerundError:
        return False
    return any("CausalLM" in architecture or "ConditionalGeneration" in architecture for architecture in architectures)


class RandomVectors:
    """Random vectors instead of a teacher's."""

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions

    def rows(self, numbers: Sequence[int]) -> np.ndarray:
        """Return a vector for each number."""
        rows = [np.random.default_rng(number).normal(size=self.dimensions) for number in numbers]
        return np.stack(rows).astype(np.float32)


class TeacherVectors:
    """A teacher's vectors of numbered texts, on the disk."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._shards = [safe_open(path, framework="numpy").get_slice(_NAME) for path in paths]

    @property
    def dimensions(self) -> int:
        """Numbers of a vector."""
        return int(self._shards[0].get_shape()[1])

    def rows(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the vectors of texts ``(n, dimensions)``, float32."""
        result = [self._shards[number // SHARD_TEXTS][number % SHARD_TEXTS] for number in numbers]
        return np.stack(result).astype(np.float32)


def teacher_vectors(
    teacher: Teacher,
    texts: Callable[[range], list[str]],
    count: int,
    folder: Path,
    report: Callable[[str], None] = lambda _: None,
) -> TeacherVectors:
    """Return a teacher's vectors of numbered texts; those that are not on the disk yet are made.

    ``texts`` returns the texts of a stretch of numbers. Shards of several teachers may share a folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    stretches = [range(first, min(first + SHARD_TEXTS, count)) for first in range(0, count, SHARD_TEXTS)]
    paths = [folder / f"{key_of(teacher.space, texts(stretch))}.safetensors" for stretch in stretches]
    missing = [place for place, path in enumerate(paths) if not _is_whole(path, report)]
    if missing:
        waiting = sum(len(stretches[place]) for place in missing)
        known = f", {count - waiting} of them known already" if waiting < count else ""
        report(f"{teacher.name} reads {count} texts{known}")
        with progress(waiting, "teacher") as advance:
            for place in missing:
                _make(teacher, texts(stretches[place]), paths[place])
                advance(len(stretches[place]))
    return TeacherVectors(paths)


def _is_whole(path: Path, report: Callable[[str], None]) -> bool:
    """Tell whether a shard is there; a damaged one, as of a copy that was cut short, is as none."""
    if not path.is_file():
        return False
    try:
        with safe_open(path, framework="numpy") as shard:
            return _NAME in shard.keys()  # noqa: SIM118 - it is no mapping
    except (SafetensorError, OSError) as error:
        report(f"{path} is damaged ({error}); its vectors are computed again")
        return False


def key_of(space: str, texts: Sequence[str]) -> str:
    """Return a hash of texts and of what reads or answers them."""
    digest = hashlib.blake2b(space.encode(), digest_size=16)
    for text in texts:
        raw = text.encode(errors="replace")
        digest.update(f"{len(raw)} ".encode() + raw)
    return digest.hexdigest()


def _make(teacher: Teacher, texts: Sequence[str], path: Path) -> None:
    """Write the vectors of a shard, whole or not at all."""
    vectors = teacher.encode(texts)
    odd = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(odd):
        raise DataError(f"the teacher {teacher.name} gives no finite vector for {texts[int(odd[0])][:60]!r}")
    # Half precision has three digits and a half; longer vectors than it holds are made shorter, not infinite.
    most = float(np.abs(vectors).max(initial=0.0))
    if most > np.finfo(np.float16).max:
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    with atomic_file(path, apart=True) as file:
        file.write(save({_NAME: vectors.astype(np.float16)}, {"teacher": teacher.name, "space": teacher.space}))


@dataclass(frozen=True)
class KnownVectors:
    """Texts with their teacher's vectors, from a file that ``gerund embed --keep-text`` wrote."""

    texts: list[str]
    vectors: np.ndarray  # ``(n, dimensions)`` float32
    space: str  # the fingerprint of the encoder that made them

    @property
    def dimensions(self) -> int:
        """Numbers of a vector."""
        return int(self.vectors.shape[1])

    def rows(self, numbers: Sequence[int]) -> np.ndarray:
        """Return the vectors of texts ``(n, dimensions)``, float32."""
        result: np.ndarray = self.vectors[list(numbers)]
        return result


def read_known(path: Path) -> KnownVectors:
    """Read texts and vectors of a Parquet file."""
    result = read_embeddings(path)
    precision = check_precision(result.info.get("precision", "float32"))
    if precision in ("binary", "ubinary"):
        raise ConfigError(
            f"{path} has a bit for each number of a vector, which says too little to learn from; embed once more "
            "without --precision, or with int8"
        )
    try:
        schema = pq.read_schema(path)
        texts = pq.read_table(path, columns=["text"]).column("text").to_pylist() if "text" in schema.names else None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({' '.join(str(error).split())})") from error
    if texts is None:
        raise ConfigError(
            f"{path} has vectors and no texts, which a student has to read; embed once more with --keep-text"
        )
    rows_with_text = [row for row, text in enumerate(texts) if text.strip()]
    if not rows_with_text:
        raise DataError(f"{path}: no texts in there")
    space = result.info.get("space") or result.info.get("fingerprint")
    ranges = result.info.get("ranges")
    vectors = restore(
        result.vectors[rows_with_text],
        precision,
        result.vectors.shape[1],
        None if ranges is None else np.asarray(ranges, np.float32),
    )
    return KnownVectors([texts[row] for row in rows_with_text], vectors, str(space))


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
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
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
                answers = map(asdict, _written(model, tokenizer, stretch, most_tokens))
                text = "".join(json.dumps(answer, ensure_ascii=False) + "\n" for answer in answers)
                write_atomic(path, text, apart=True)
                advance(len(stretch))
    texts_of_paths = "".join(path.read_text("utf-8") for path in paths)
    return [Answer(**json.loads(line)) for line in texts_of_paths.split("\n") if line]


def _written(model: Any, tokenizer: Any, texts: Sequence[str], most_tokens: int) -> list[Answer]:
    prompts: list[Any] = list(texts)
    if tokenizer.chat_template is not None:
        prompts = [[{"role": "user", "content": text}] for text in texts]
    results = generate(model, tokenizer, prompts, GenerationConfig.of(most_tokens, None, {}))
    return [Answer(result.text.strip(), result.finished) for result in results]
