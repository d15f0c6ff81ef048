"""``gerund.adapt``: train a model on your documents, and evaluate search on held-out ones before and after.

::

    OUT/adapt.json      the options; a resumed run compares them
    OUT/recipe.yaml     the recipe that was chosen, which gerund train takes too
    OUT/choice.json     why it was chosen
    OUT/data/           the documents to train on, and their pairs
    OUT/base/           the model with the adapter that comes with gerund, if it is one of these
    OUT/run/            the training: its log and checkpoints
    OUT/reranker/       that of the reranker, and its recipe in OUT/reranker.yaml, if one was asked for
    OUT/model/          the model with its new adapter
    OUT/measured/       evaluation before and after, query by query
    OUT/report.html     the report
    OUT/report.json     the same for programs
"""

import gc
import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from gerund.adaptation.config import AdaptConfig, Base, Choice, Machine, choose, reranker_settings, settings_for
from gerund.adaptation.data import Collected, Pairs, Split, make_pairs, name_of, read_documents, split_documents
from gerund.adaptation.evaluation import (
    SECOND_STAGES,
    Adapted,
    Measured,
    compare,
    evaluation_seconds,
    measure,
    require_statistics,
    write_report,
)
from gerund.checks import demand_unicode, place, read_json
from gerund.entry import load
from gerund.errors import ConfigError, InputError, ModelError, OutputExistsError
from gerund.inference.tokens import context_length
from gerund.jobs.checkpoints import resume_hint
from gerund.jobs.files import LOCK, lock_folder, make_folder, write_atomic
from gerund.models import loading
from gerund.models.adapters import count_parameters
from gerund.models.saved_settings import has_scorer
from gerund.models.sources import find
from gerund.retrieval.document_reader import ReadLimits
from gerund.settings.fields import NO_ADAPTER
from gerund.settings.model_spec import EncoderSpec, ModelSpec
from gerund.training.recipe import Recipe, find_recipe, load_recipe, made_by
from gerund.training.run_folder import newest_checkpoint, step_of

if TYPE_CHECKING:
    from gerund.language_model import LanguageModel


def check_adaptable(model: str) -> None:
    """Raise ModelError for what can't be adapted: no model, or a T5."""
    try:
        source = find(model)
    except ModelError as error:
        raise ModelError(f"{error}{made_by(model)}") from error
    source.demand_reachable()
    if loading.is_seq2seq(source):
        raise ModelError(
            f"{model} has an encoder of its own, which no adapter is trained for; train it whole: gerund mine on your "
            f"texts, then gerund train gur-default model.base={model}"
        )


def encoder_settings(spec: ModelSpec) -> dict[str, Any]:
    """Return the encoder settings of a spec, as a recipe writes them."""
    return spec.model_dump(mode="json", include=set(EncoderSpec.model_fields), exclude_none=True)


def open_base(spec: ModelSpec, folder: Path) -> "tuple[LanguageModel, Base]":
    """Load a model, with what a recipe depends on in it; ``folder`` is for one whose adapter comes with gerund."""
    lm = load(spec, runtime="torch")
    lm.encoder.refuse_methods("training", takes=("exit_layer",))
    name = spec.model
    if lm.bundled is not None:
        # An adapter that comes with gerund is trained further like one of a folder.
        name = str(folder / "base")
        if not (folder / "base").is_dir():
            lm.save(name)
    base = Base(
        name=name,
        parameters=count_parameters(lm.model),
        layers=lm.n_layers,
        width=lm.runtime.state_width,
        vocabulary=int(lm.model.get_input_embeddings().weight.shape[0]),
        adapter="encode" in _adapters(name),
        longest=context_length(lm.model.config, lm.tokenizer),
    )
    return lm, base


def finish(model: str, trained: Path, target: Path) -> None:
    """Write the model with the new adapter, which only encodes: infilling, scoring and generation stay unchanged."""
    settings = loading.settings_folder(find(model))
    infill = model if "infill" in _adapters(model) else NO_ADAPTER
    scorer = model if settings is not None and has_scorer(settings) else None
    load(trained, infill_adapter=infill, scorer=scorer).save(target)


def _adapters(model: str) -> dict[str, Path]:
    source = find(model)
    return {str(job): path for job, path in loading.own_adapters(source, loading.settings_folder(source)).items()}


FORMAT = 1
Say = Callable[[str], None]


def adapt(
    model: str | Path | ModelSpec | None = None,
    texts: str | Path | Sequence[str | Path] = (),
    output: str | Path = "adapted",
    config: AdaptConfig | None = None,
    *,
    resume: bool = False,
    show_progress: bool | None = None,
    say: Say | None = None,
    limits: ReadLimits | None = None,
    **settings: Any,
) -> Adapted:
    """Train a model's encoder on your own documents, and measure whether that helps to find them.

    A fraction of the documents is put aside; nothing of them is trained on. Of the others pairs are made: sentences
    with a long common substring (as ``gerund mine`` finds them), and titles or first sentences with chunks. The
    finished model generates bit for bit what it did.

    Args:
        model: a folder or hub id; None for the bundled model; or a :class:`ModelSpec`. How that reads texts holds
            while it is trained too; its device and type are for making pairs and measuring.
        texts: files and folders of documents, of the kinds that ``gerund index`` reads.
        output: the folder of the finished model, the report, and everything on the way.
        config: how it is adapted.
        resume: go on with what an interrupted run has left in ``output``.
        show_progress: None shows bars on a terminal.
        say: called with a sentence after each step; None for silence.
        limits: what reading a document may take; None for the usual limits.
        settings: fields of :class:`AdaptConfig`, such as ``minutes=20``, in the place of what ``config`` says.

    Returns:
        What was measured, where the model and the report lie, and ``verdict``, a sentence.

    Raises:
        DataError: there are too few documents, questions or pairs, or no file can be read.
        ModelError: no such model, or a T5.
        ConfigError: an impossible setting, or another one than that of the run to be resumed.
        OutputExistsError: there is something in ``output`` already.
        ResourceError: memory or disk ran out; what was finished is kept.
        KeyboardInterrupt: with a note that says what is kept.
    """
    options = replace(config or AdaptConfig(), **settings)
    demand_unicode("output", str(output))  # recipes and reports name it
    job = _Job(model, texts, place("output", output), options, show=show_progress, say=say, limits=limits)
    return job.run(resume=resume)


def plan(
    model: str | Path | ModelSpec | None = None,
    texts: str | Path | Sequence[str | Path] = (),
    options: AdaptConfig | None = None,
    *,
    show_progress: bool | None = None,
    say: Say | None = None,
    limits: ReadLimits | None = None,
) -> Choice:
    """Return the recipe that ``adapt`` would carry out, with its time and memory, and write nothing.

    Raises:
        GerundError: as ``adapt``.
    """
    options = options or AdaptConfig()
    with TemporaryDirectory(prefix="gerund-") as folder:
        job = _Job(model, texts, Path(folder) / "out", options, show=show_progress, say=say, limits=limits)
        job.output.mkdir()
        split, lm = job.read(None), job.open()
        choice = job.choose(job.pairs(split, lm).count, measured=True)
        minutes = 2 * evaluation_seconds(lm, split, options.language) / 60
        job.say(f"measuring before and after: about {max(minutes, 0.1):.1f} minutes more")
        return choice


class _Job:
    """One model on its way."""

    def __init__(
        self,
        model: str | Path | ModelSpec | None,
        texts: str | Path | Sequence[str | Path],
        output: Path,
        options: AdaptConfig,
        *,
        show: bool | None,
        say: Say | None,
        limits: ReadLimits | None,
    ) -> None:
        self.spec = _spec(model)
        given = [texts] if isinstance(texts, str | Path) else list(texts)
        self.texts, self.output, self.options = [place("texts", path) for path in given], output, options
        self.show, self.say, self.limits = show, say or (lambda _: None), limits
        self.collected: Collected

    def run(self, *, resume: bool) -> Adapted:
        """Do what is not done yet."""
        require_statistics()
        self._check_output(resume)
        if self.options.recipe is not None:
            find_recipe(self.options.recipe)
        check_adaptable(self.spec.model)
        begin = time.perf_counter()
        split = self.read(self.output)
        with lock_folder(self.output), resume_hint(self._resume_hint):
            self._write_options(split)
            opened, pairs, choice = self._prepared(split)
            # Popped, so that its memory is free: training loads the model again, in fp32.
            before = self._measured("before", split, opened.pop)
            opened.clear()
            gc.collect()
            self._train(choice)
            after = self._measured("after", split, self._load_adapted)
            done = Adapted(
                model=self.spec.model,
                folder=self.output,
                collected=self.collected,
                split=split,
                pairs=pairs,
                choice=choice,
                before=before,
                after=after,
                compared=tuple(compare(before, after, self.options.seed)),
                options=self.options,
                parameters=self.base.parameters,
                seconds=time.perf_counter() - begin,
            )
            write_report(done)
        return done

    def read(self, output: Path | None) -> Split:
        """Read the documents, in whose folders the output must not lie, and put some aside."""
        self.collected = read_documents(self.texts, output, show=self.show, limits=self.limits)
        self.say(f"read {self.collected.summary}")
        for item in self.collected.failed[:5]:
            self.say(f"warning: {item.reason}")
        roots = [name_of(path) for path in self.texts]
        split = split_documents(self.collected.documents, self.options, roots)
        self.say(split.summary)
        return split

    def open(self) -> "LanguageModel":
        """Load the model."""
        check_adaptable(self.spec.model)
        lm, self.base = open_base(self.spec, self.output)
        return lm

    def _load_adapted(self) -> "LanguageModel":
        return load(self.output / "model", dtype=self.spec.dtype, device=self.spec.device)

    def pairs(self, split: Split, lm: "LanguageModel") -> Pairs:
        """Make the pairs."""
        pairs = make_pairs(split, self.output / "data", self.options, lm, show=self.show)
        self.say(pairs.summary)
        return pairs

    def choose(self, pairs: int, *, measured: bool) -> Choice:
        """Choose the recipe."""
        machine = Machine.this()
        # Whole paths, so that a resumed run may be started from another folder.
        whole = self.output.resolve()
        settings = settings_for(self.base, machine, self.options, whole / "data", whole / "run")
        if text := encoder_settings(self.spec):
            settings["encoder"] = dict(settings.get("encoder") or {}) | text
        return self._chosen(settings, self.options, pairs, machine, self.output / "recipe.yaml", measured=measured)

    def _chosen(self, *given: Any, measured: bool) -> Choice:
        try:
            choice = choose(*given, measured=measured)
        except BaseException:
            # A recipe file means that the choice is made.
            given[-1].unlink(missing_ok=True)
            raise
        self.say(choice_summary(choice))
        return choice

    def _check_output(self, resume: bool) -> None:
        if self.output.exists() and not self.output.is_dir():
            raise OutputExistsError(f"{self.output} is a file; an output is a folder")
        started = (self.output / "adapt.json").is_file()
        if not started and self.output.is_dir() and any(path.name != LOCK for path in self.output.iterdir()):
            raise OutputExistsError(f"{self.output} exists already; choose another output")
        if started and (self.output / "report.json").is_file():
            raise OutputExistsError(f"{self.output} is finished already; choose another output, or remove the folder")
        if started and not resume:
            raise OutputExistsError(
                f"{self.output} holds an unfinished run; go on with --resume or choose another output"
            )

    def _prepared(self, split: Split) -> "tuple[list[LanguageModel], Pairs, Choice]":
        """Return the model in a list, the pairs and the recipe; an impossible setting leaves no files."""
        try:
            lm = self.open()
            pairs = self._stored_pairs(split, lm)
            return [lm], pairs, self._stored_choice(pairs)
        except (InputError, ModelError):
            if not (self.output / "choice.json").is_file():
                for name in ("data", "base"):
                    shutil.rmtree(self.output / name, ignore_errors=True)
                (self.output / "adapt.json").unlink(missing_ok=True)
            raise

    def _write_options(self, split: Split) -> None:
        """Write the options, or compare them with those of the run to resume."""
        now = {
            "format": FORMAT,
            "model": self.spec.model,
            "encoder": encoder_settings(self.spec),
            "documents": self.collected.digest,
            "queries": split.digest,
            "options": self.options.to_dict(),
        }
        path = self.output / "adapt.json"
        if path.is_file():
            before = read_json(path)
            differing = [name for name in now if before.get(name, {}) != now[name]]
            if differing:
                raise ConfigError(
                    f"{self.output} was begun with other {' and '.join(differing)}; go on as before, or choose another "
                    "output"
                )
        write_atomic(path, json.dumps(now, indent=1) + "\n")

    def _stored_pairs(self, split: Split, lm: "LanguageModel") -> Pairs:
        path = self.output / "data" / "counts.json"
        if path.is_file():
            return Pairs(**read_json(path))
        pairs = self.pairs(split, lm)
        write_atomic(path, json.dumps(asdict(pairs)))
        return pairs

    def _stored_choice(self, pairs: Pairs) -> Choice:
        path = self.output / "choice.json"
        if path.is_file():
            return Choice(recipe=load_recipe(self.output / "recipe.yaml"), **read_json(path))
        choice = self.choose(pairs.count, measured=False)
        write_atomic(path, json.dumps(choice.reasons()))
        return choice

    def _measured(self, when: str, split: Split, model: "Callable[[], LanguageModel]") -> Measured:
        path = self.output / "measured" / f"{when}.json"
        if path.is_file():
            return Measured.from_dict(read_json(path))
        self.say(f"measuring {when} training: {len(split.corpus):,} documents, {len(split.queries)} queries")
        second = SECOND_STAGES if when == "after" and self.options.reranker else ()
        label = f"measuring {when}"
        measured = measure(model(), split, self.options.language, label, second=second, show=self.show)
        make_folder(path.parent)
        write_atomic(path, json.dumps(measured.to_dict()))
        return measured

    def _train(self, choice: Choice) -> None:
        """Train, unless the model is there already."""
        target, trained = self.output / "model", self.output / "run" / "model"
        if target.is_dir():
            return
        encoder = self.output / "encoder" if self.options.reranker else target
        if not encoder.is_dir():
            _trained(choice.recipe, trained)
            finish(self.base.name, trained, encoder)
            # Both have the same weights.
            shutil.rmtree(trained, ignore_errors=True)
            shutil.rmtree(self.output / "run" / "checkpoints", ignore_errors=True)
        if self.options.reranker:
            run = self.output / "reranker"
            _trained(self._reranker_recipe(encoder), run / "model")
            (run / "model").replace(target)
            shutil.rmtree(encoder, ignore_errors=True)
            shutil.rmtree(run / "checkpoints", ignore_errors=True)

    def _reranker_recipe(self, encoder: Path) -> Recipe:
        """Return the recipe that adds a reranker to the trained model; it is chosen once."""
        file, whole = self.output / "reranker.yaml", self.output.resolve()
        if file.is_file():
            return load_recipe(file)
        machine, options = Machine.this(), replace(self.options, recipe=None)
        base = replace(self.base, name=str(encoder.resolve()))
        settings = reranker_settings(base, machine, options, whole / "data", whole / "reranker")
        lists = settings["objectives"][0]["lists"]
        return self._chosen(settings, options, lists, machine, file, measured=False).recipe

    def _resume_hint(self) -> str:
        if not (self.output / "adapt.json").is_file():
            return ""
        stored = []
        if (self.output / "data" / "counts.json").is_file():
            stored.append("the pairs")
        checkpoint, _ = newest_checkpoint(self.output / "run" / "checkpoints")
        if (self.output / "model").is_dir():
            stored.append("the trained model")
        elif checkpoint is not None:
            stored.append(f"the training up to step {step_of(checkpoint)}")
        what = " and ".join(stored) or "nothing yet"
        return f"{self.output} keeps {what}: give --resume to go on from there"


def _trained(recipe: Recipe, folder: Path) -> None:
    """Train by a recipe, unless the finished model is there already."""
    if folder.is_dir():
        return
    from gerund.training.run import train

    try:
        train(recipe, resume=True)
    except KeyboardInterrupt as stop:
        # The hint of this run replaces that of its training.
        stop.__notes__ = []
        raise


def choice_summary(choice: Choice) -> str:
    """Say what will be trained, for how long, and in how much memory."""
    recipe = choice.recipe
    lora = recipe.model.lora
    what = "its adapter, trained further" if lora is None else f"a new adapter of rank {lora.rank}"
    text = f"{recipe.objectives[0].kind}: {what}; {recipe.steps:,} steps of {recipe.objectives[0].batch_size}"
    if choice.epochs is not None:
        text += f", {choice.epochs:.1f} times through the pairs"
    if choice.seconds is not None:
        text += f"; about {choice.seconds / 60:.1f} minutes and {choice.memory_mib:,} MiB"
    return text


def _spec(model: Any) -> ModelSpec:
    spec = ModelSpec.of(model)
    for name in ("adapter", "infill_adapter", "scorer", "sample"):
        if getattr(spec, name) is not None:
            raise ConfigError(
                f"{name} is no setting of a model that is adapted; save it with lm.save, and adapt that folder"
            )
    return spec
