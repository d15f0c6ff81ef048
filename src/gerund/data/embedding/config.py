"""How a table becomes a file of embeddings, and what came of it.

Knows: names and limits of options. Does not know: tables, vectors.
"""

from dataclasses import dataclass
from pathlib import Path

from gerund.data.embedding.files import output_files
from gerund.data.embedding.survey import BAD_ROWS, EMPTY, OVERFLOW, BadRows, EmptyTexts, Overflow
from gerund.data.tables import BadRow
from gerund.errors import ConfigError, unknown_name
from gerund.jobs.files import errors_file_of


@dataclass(frozen=True)
class EmbeddingConfig:
    """How a table becomes a file."""

    empty: EmptyTexts = "error"
    """What becomes of a row whose text is empty: an error, a vector of zeros, or nothing."""

    bad_rows: BadRows = "error"
    """What becomes of a row that cannot be used: an error, or it is left out and listed in ``OUT.errors.jsonl``. It is
    malformed, has no text where that is an error, is refused by the encoder, or gets a vector that is not finite."""

    overflow: Overflow = "truncate"
    """What the encoder does with a text that is too long: it cuts it, or refuses it."""

    keep_text: bool = False
    """Whether the texts are stored too."""

    shard_rows: int = 4096
    """Rows a part; batches are made of texts of one part."""

    force: bool = False
    """Replace an output that is there, and begin anew where unfinished work does not fit."""

    def __post_init__(self) -> None:
        if self.empty not in EMPTY:
            raise unknown_name("way with empty texts", self.empty, EMPTY)
        if self.bad_rows not in BAD_ROWS:
            raise unknown_name("way with bad rows", self.bad_rows, BAD_ROWS)
        if self.overflow not in OVERFLOW:
            raise unknown_name("--overflow", self.overflow, OVERFLOW)
        if self.shard_rows < 1:
            raise ConfigError(f"shard_rows={self.shard_rows} leaves no row for a part")

    def files_of(self, output: Path) -> list[Path]:
        """Return all files that may come with an output, the one that stands for all of them last.

        Raises:
            ConfigError: the output's ending is neither .parquet nor .npy.
        """
        listed = [errors_file_of(output)] if self.force or self.bad_rows == "skip" else []
        return [*listed, *output_files(output)]


@dataclass(frozen=True)
class EmbeddingSummary:
    """How a job went."""

    files: list[Path]
    rows: int
    """Rows of the output."""
    resumed_rows: int
    truncated: int
    empty: int
    bad: int
    """Rows that were left out since they cannot be used."""
    first_bad: tuple[BadRow, ...]
    """The first few of them."""
    errors_file: Path | None
    """Where all of them are listed; None where there is none."""
    dimensions: int
    seconds: float
    """Reading, encoding and writing in this process; the first reading and loading the model do not count."""

    @property
    def rows_per_second(self) -> float:
        """Rows of this process a second."""
        return (self.rows - self.resumed_rows) / max(self.seconds, 1e-9)
