"""``gerund negatives``: make training data for a scorer of continuations: passages with wrong continuations."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from gerund.cli import options
from gerund.cli.text_io import tell_unused
from gerund.errors import ConfigError, FingerprintError
from gerund.scoring.names import MEASURE_NAMES
from gerund.settings.sampling import Sampling

if TYPE_CHECKING:
    from gerund.jobs.engine import JobEngine
    from gerund.language_model import LanguageModel
    from gerund.papers.rankgen_negatives import Elsewhere, Made
    from gerund.settings.model_spec import ModelSpec
    from gerund.types import Scorer
    from gerund.worker_model import WorkerModel


@options.takes(
    spec=options.model(
        "model",
        *options.MACHINE,
        helps={"model": "Model that generates continuations. [default: the bundled model]"},
    ),
    sampling=options.sampling("temperature", "top_p", "top_k", "typical_p"),
    where=options.machines(),
)
def command(
    corpus: Annotated[
        list[Path], typer.Argument(help="Files or folders of documents (.jsonl, .txt, .md, .parquet, .gz, .xz).")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")],
    *,
    spec: "ModelSpec",
    generate: Annotated[
        float, typer.Option(help="Fraction of the passages that get a generated continuation, 0 to 1.")
    ] = 0.5,
    hard: Annotated[
        int, typer.Option(help="Hard stretches of the same document for each passage; needs --scorer.")
    ] = 0,
    scorer: Annotated[
        str | None, typer.Option(help="Finds the hard ones: pmi, overlap, ..., or a scorer's folder.")
    ] = None,
    prefix_words: Annotated[int, typer.Option(help="Words of a prefix at most.")] = 256,
    fewest_words: Annotated[int, typer.Option(help="Words of a continuation at least.")] = 10,
    most_words: Annotated[int, typer.Option(help="Words of a continuation at most.")] = 128,
    per_document: Annotated[
        int | None, typer.Option(help="Most passages per document. [default: one from every sentence]")
    ] = None,
    part: Annotated[
        str,
        typer.Option(help="Which documents: 2/2 every second one, 1/2 the others, on which a generator was trained."),
    ] = "1/1",
    clean: Annotated[
        str, typer.Option(help="Quirks to remove first: none, gutenberg (hard-wrapped lines) or wikipedia.")
    ] = "none",
    text_column: Annotated[str, typer.Option(help="Column or field that holds the text.")] = "text",
    sampling: dict[str, Any],
    seed: Annotated[int, typer.Option(help="Random seed of passages and samples.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Prefixes that are continued in one pass.")] = 32,
    where: options.Machines,
    resume: Annotated[bool, typer.Option("--resume", help="Resume an interrupted run.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Start again if the folder holds an earlier run, finished or not.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Make passages with wrong continuations, to train a scorer of continuations on.

    A passage is a prefix and what follows it in its document, both whole sentences. Training takes other stretches of
    the same document as wrong continuations by itself. This command adds continuations that a model generates (by
    nucleus sampling with p 0.9 unless an option says otherwise), and hard stretches, which a scorer mistakes for the
    right one. Documents that cannot be used are skipped and listed in OUT/errors.jsonl. An interrupted run continues
    with --resume.

    For example:

        gerund negatives books.jsonl -o passages

        gerund negatives books/ -o passages --clean gutenberg --per-document 200 --generate 1 -m ./model

        gerund negatives books.jsonl -o hard --generate 0 --hard 10 --scorer overlap

        gerund negatives shared/books.jsonl -o shared/passages --engine ray --address auto
    """
    from gerund.data.corpus import corpus_files
    from gerund.jobs.engine import runs_in_process
    from gerund.scoring.names import WORD_MEASURE_NAMES, check_scorer

    check_scorer(scorer)
    from gerund.entry import load_writer
    from gerund.models.architectures import demand_decoder_only
    from gerund.papers.rankgen_negatives import NegativesConfig, demand_output, make_negatives
    from gerund.worker_model import WorkerModel

    config = NegativesConfig(
        clean=clean,
        prefix_words=prefix_words,
        fewest_words=fewest_words,
        most_words=most_words,
        per_document=per_document,
        generate=generate,
        hard=hard,
        sampling=options.sampling_of(sampling, Sampling(1.0, top_p=0.9)),
        part=part,
        seed=seed,
    )
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size} leaves no room for a prefix")
    if (scorer is None) != (hard == 0):
        raise ConfigError("--hard and --scorer belong together")
    files = corpus_files(corpus)
    demand_output(output, resume=resume, force=force)
    machines = where.start(usual=1)
    # Shared words and trained scorers need no model that writes.
    measured = scorer in MEASURE_NAMES and scorer not in WORD_MEASURE_NAMES
    lm = load_writer(spec) if generate or measured else None
    if lm is not None:
        demand_decoder_only(lm.model, "continue a text")
    judge = _judge(scorer, lm, seed)
    model = None if lm is None or runs_in_process(machines) else WorkerModel.of(lm, threads=where.threads)
    made = make_negatives(
        files,
        output,
        config,
        lm=lm,
        scorer=judge,
        text_column=text_column,
        batch_size=batch_size,
        elsewhere=None if runs_in_process(machines) else _elsewhere(machines, _Loading.of(model, scorer, judge, seed)),
        resume=resume,
        force=force,
    )
    if as_json:
        typer.echo(json.dumps({"folder": str(output), **asdict(made)}))
        return
    _tell(made, output)


def _tell(made: "Made", output: Path) -> None:
    typer.echo(f"{made.passages:,} passages of {made.documents - made.short:,} documents in {output}")
    typer.echo(f"{made.generated:,} generated and {made.hard:,} hard continuations")
    if made.short:
        typer.echo(f"{made.short:,} documents were too short")
    tell_unused("document", made.errors, (), output / "errors.jsonl")


def _elsewhere(machines: "JobEngine", load: "_Loading") -> "Elsewhere":
    from gerund.papers.rankgen_negatives import Elsewhere

    return Elsewhere(machines, load, *((load.model.gpus, load.model.threads) if load.model else ()))


def _judge(scorer: str | None, lm: "LanguageModel | None", seed: int) -> "Scorer | None":
    from gerund.entry import load
    from gerund.scoring.registry import find_scorer, fixed_scorer

    if scorer is None:
        return None
    return fixed_scorer(scorer, load) if lm is None else find_scorer(scorer, lm, seed=seed)


@dataclass(frozen=True)
class _Loading:
    """Loads the model and the scorer in another process."""

    model: "WorkerModel | None"
    scorer: str | None
    fingerprint: str
    seed: int

    @classmethod
    def of(cls, model: "WorkerModel | None", scorer: str | None, judge: "Scorer | None", seed: int) -> Self:
        # A worker may stand in another folder.
        is_path = scorer is not None and scorer not in MEASURE_NAMES and Path(scorer).exists()
        place = str(Path(scorer).absolute()) if scorer is not None and is_path else scorer
        return cls(model, place, getattr(judge, "fingerprint", ""), seed)

    def __call__(self) -> "tuple[LanguageModel | None, Scorer | None]":
        lm = None if self.model is None else self.model.load()
        judge = _judge(self.scorer, lm, self.seed)
        if getattr(judge, "fingerprint", "") != self.fingerprint:
            raise FingerprintError(f"a machine that works on this job has another scorer at {self.scorer}")
        return lm, judge
