"""lm-evaluation-harness: its tasks by name, and local multiple-choice and last-word files in its formats.

The harness runs the unmodified causal model, regardless of the attention plan.
"""

import copy
import io
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

from gerund.errors import DataError, GerundError, MissingDependencyError
from gerund.evaluation.data_files import CHOICES_FOLDER, read_choices, read_json_lines, single_files
from gerund.evaluation.systems.base import HasLikelihoods
from gerund.evaluation.task import EvaluationConfig, Score, Side, Task
from gerund.inference.tokens import context_length
from gerund.language_model import LanguageModel

LAST_WORDS = "last_word"
# Of a task's metrics the first that it has stands for it.
_MAIN = ("acc_norm", "acc", "exact_match", "mc2", "f1", "word_perplexity", "perplexity")


@dataclass(frozen=True, kw_only=True)
class HarnessTask(Task):
    """A task of lm-evaluation-harness, zero-shot, on the untouched model. ``config.limit`` counts examples."""

    kind: ClassVar[str] = "lm-eval"
    data_folder: ClassVar[str] = LAST_WORDS
    in_all: ClassVar[bool] = False
    side: ClassVar[Side] = "generation"
    reads_plan: ClassVar[bool] = False
    requires: ClassVar[type] = HasLikelihoods

    @classmethod
    def find(cls, folder: Path) -> list[Task]:
        """Return a task for every ``suffix/NAME.jsonl`` and every ``last_word/NAME.jsonl``."""
        choices, last_words = (
            {f"{name}.local": paths for name, paths in single_files(place).items()}
            for place in (folder / CHOICES_FOLDER, folder / cls.data_folder)
        )
        return sorted([*LocalChoices.of(choices), *LocalLastWords.of(last_words)], key=lambda task: task.name)

    @classmethod
    def known_names(cls) -> list[str]:
        """Return the names of the harness's own tasks, whose data are fetched when they run."""
        require_lm_eval()
        return list(_own_tasks().all_tasks)

    def run(self, system: HasLikelihoods, config: EvaluationConfig) -> Score:
        """Run the harness."""
        try:
            results = run_tasks(
                system.causal_lm,
                [self.task(config)],
                limit=config.limit,
                seed=config.seed,
                show=config.show_progress,
            )
        except (GerundError, ImportError):
            raise
        except Exception as error:
            # The harness fails in as many ways as its tasks, data sets and the network have.
            raise DataError(f"{self.name} cannot be run: {' '.join(str(error).split())[:300]}") from error
        metrics = {name: value for values in results.values() for name, value in values.items()}
        main = next((name for name in _MAIN if name in metrics), next(iter(metrics)))
        return Score(main, metrics)

    def task(self, config: EvaluationConfig) -> Any:
        """Return what the harness runs: here the name of one of its own."""
        del config
        return self.title


@dataclass(frozen=True, kw_only=True)
class LocalChoices(HarnessTask):
    """The likeliest continuation, as the harness's ``hellaswag``: by its sum, and by its length in bytes."""

    def task(self, config: EvaluationConfig) -> Any:
        """Return the file as a task."""
        return multiple_choice_task(self.files[0], self.title, limit=config.limit)


@dataclass(frozen=True, kw_only=True)
class LocalLastWords(HarnessTask):
    """The last word of a text, as the harness's ``lambada``."""

    def task(self, config: EvaluationConfig) -> Any:
        """Return the file as a task."""
        return last_word_task(self.files[0], self.title, limit=config.limit)


@cache
def _own_tasks() -> Any:
    """Return the manager of the harness's own tasks; making it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def require_lm_eval() -> None:
    """Check that lm-evaluation-harness is there."""
    try:
        import lm_eval  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError("tasks of lm-evaluation-harness need it: pip install 'gerund[lm-eval]'") from error


def lm_eval_model(lm: LanguageModel, *, batch_size: int = 16) -> Any:
    """Return a model for ``lm_eval.evaluator.evaluate``, on the weights in memory.

    Args:
        lm: the model. Whatever its plan is, the harness runs the untouched causal model.
        batch_size: texts in one pass.

    Returns:
        An ``lm_eval.models.huggingface.HFLM``.

    Raises:
        MissingDependencyError: lm-evaluation-harness is not installed.
    """
    require_lm_eval()
    from lm_eval.models.huggingface import HFLM

    with _quiet():
        return HFLM(
            pretrained=lm.model,
            # The harness gives its tokenizer a padding token, and turns its padding side.
            tokenizer=copy.deepcopy(lm.tokenizer),
            batch_size=batch_size,
            max_length=context_length(lm.model.config, lm.tokenizer),
            device=str(lm.device),
        )


def multiple_choice_task(path: Path, name: str, *, limit: int | None = None) -> dict[str, Any]:
    """Return a task of the harness: the likeliest continuation, as its ``hellaswag`` (``acc``, ``acc_norm``)."""
    rows = [
        {"query": choice.prefix, "choices": list(choice.candidates), "gold": choice.gold}
        for choice in read_choices(path)[:limit]
    ]
    return {
        **_task(name, rows),
        "output_type": "multiple_choice",
        "doc_to_text": "{{query}}",
        "doc_to_choice": "choices",
        "doc_to_target": "gold",
        "metric_list": [_metric("acc"), _metric("acc_norm")],
    }


def last_word_task(path: Path, name: str, *, limit: int | None = None) -> dict[str, Any]:
    """Return a task of the harness: the last word of each text, as its ``lambada`` (``acc``, ``perplexity``)."""
    rows = []
    for row in read_json_lines(path)[:limit]:
        text = row.text("text").rstrip()
        words = text.rsplit(None, 1)
        if len(words) < 2:
            raise DataError(f"{row.where}: 'text' has a single word, and nothing to predict it from")
        rows.append({"query": words[0], "word": text[len(words[0]) :]})  # with the white space between them
    return {
        **_task(name, rows),
        "output_type": "loglikelihood",
        "doc_to_text": "{{query}}",
        "doc_to_target": "{{word}}",
        "target_delimiter": "",
        "metric_list": [_metric("perplexity", better=False), _metric("acc")],
    }


def run_tasks(
    lm: LanguageModel,
    tasks: Sequence[Mapping[str, Any] | str],
    *,
    limit: int | None = None,
    seed: int = 0,
    show: bool | None = None,
) -> dict[str, dict[str, float]]:
    """Run tasks of the harness."""
    require_lm_eval()
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    named = any(isinstance(task, str) for task in tasks)
    with _quiet(show):
        manager = _own_tasks() if named else TaskManager(include_defaults=False)
        loaded = manager.load([task if isinstance(task, str) else dict(task) for task in tasks])
        for task in loaded["tasks"].values():
            task.set_fewshot_seed(seed=seed)
        model = lm_eval_model(lm)
        results = evaluator.evaluate(model, loaded, limit=limit, bootstrap_iters=0, log_samples=False)
    return {
        task: {
            metric.partition(",")[0]: float(value)
            for metric, value in values.items()
            if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
        }
        for task, values in results["results"].items()
    }


def _task(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    def dataset(**_: Any) -> Any:
        from datasets import Dataset, DatasetDict

        return DatasetDict(test=Dataset.from_list(rows))

    return {"task": name, "custom_dataset": dataset, "test_split": "test"}


def _metric(name: str, *, better: bool = True) -> dict[str, Any]:
    return {"metric": name, "aggregation": "perplexity" if name == "perplexity" else "mean", "higher_is_better": better}


@contextmanager
def _quiet(show: bool | None = False) -> Iterator[None]:
    """Keep the harness's log to errors, and its bars to a terminal."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "lm-eval")]
    levels = [logger.level for logger in loggers]
    shown = sys.stderr.isatty() if show is None else show
    with ExitStack() as stack:
        if not shown:
            stack.enter_context(redirect_stderr(io.StringIO()))
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
