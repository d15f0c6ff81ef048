"""Tasks that lm-evaluation-harness runs: local files in the form of its own, and those that it fetches by name.

Knows: names and metrics of the harness's tasks. Does not know: how it runs them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gerund.errors import DataError, GerundError
from gerund.evaluation.sets.choices import choice_files
from gerund.evaluation.sets.labelled import named_files
from gerund.evaluation.task import Score, Settings, Side, Task

if TYPE_CHECKING:
    from gerund.evaluation.contender import Contender

LAST_WORDS = "last_word"
# Of a task's metrics the first that it has stands for it.
_MAIN = ("acc_norm", "acc", "exact_match", "mc2", "f1", "word_perplexity", "perplexity")


@dataclass(frozen=True, kw_only=True)
class HarnessTask(Task):
    """A task of lm-evaluation-harness, zero-shot, on the untouched model. ``settings.limit`` counts examples."""

    kind: ClassVar[str] = "lm-eval"
    side: ClassVar[Side] = "generation"
    reads_plan: ClassVar[bool] = False
    always_needs_likelihoods: ClassVar[bool] = True

    def run(self, contender: "Contender", settings: Settings) -> Score:
        """Run the harness.

        Raises:
            MissingDependencyError: lm-evaluation-harness is not installed.
            DataError: the data cannot be had, or are malformed.
        """
        from gerund.evaluation.lm_eval import run_tasks

        try:
            found = run_tasks(
                contender.lm,
                [self.task(settings)],
                limit=settings.limit,
                seed=settings.seed,
                show=settings.show_progress,
            )
        except (GerundError, ImportError):
            raise
        except Exception as error:
            # The harness fails in as many ways as its tasks, data sets and the network have.
            raise DataError(f"{self.name} cannot be run: {' '.join(str(error).split())[:300]}") from error
        metrics = {name: value for values in found.values() for name, value in values.items()}
        main = next((name for name in _MAIN if name in metrics), next(iter(metrics)))
        return Score(main, metrics)

    def task(self, settings: Settings) -> Any:
        """Return what the harness runs: here the name of one of its own."""
        del settings
        return self.title


@dataclass(frozen=True, kw_only=True)
class LocalChoices(HarnessTask):
    """The likeliest continuation, as the harness's ``hellaswag``: by its sum, and by its length in bytes."""

    def task(self, settings: Settings) -> Any:
        """Return the file as a task."""
        from gerund.evaluation.lm_eval import multiple_choice_task

        return multiple_choice_task(self.files[0], self.title, limit=settings.limit)


@dataclass(frozen=True, kw_only=True)
class LocalLastWords(HarnessTask):
    """The last word of a text, as the harness's ``lambada``."""

    def task(self, settings: Settings) -> Any:
        """Return the file as a task."""
        from gerund.evaluation.lm_eval import last_word_task

        return last_word_task(self.files[0], self.title, limit=settings.limit)


def find(folder: Path) -> list[Task]:
    """Return a task for every ``suffix/NAME.jsonl`` and every ``last_word/NAME.jsonl``."""
    choices: Sequence[Task] = [
        LocalChoices(name=f"lm-eval/{name}.local", files=(path,)) for name, path in choice_files(folder).items()
    ]
    words: Sequence[Task] = [
        LocalLastWords(name=f"lm-eval/{name}.local", files=(path,))
        for name, path in named_files(folder / LAST_WORDS).items()
    ]
    return sorted([*choices, *words], key=lambda task: task.name)


def named_tasks(names: Sequence[str]) -> list[Task]:
    """Return the harness's own tasks; their data are fetched when they run."""
    return [HarnessTask(name=f"lm-eval/{name}") for name in names]


@cache
def known_names() -> list[str]:
    """Return the names of the harness's own tasks.

    Raises:
        MissingDependencyError: lm-evaluation-harness is not installed.
    """
    from gerund.evaluation.lm_eval import require_lm_eval

    require_lm_eval()
    from lm_eval.tasks import TaskManager

    return list(TaskManager().all_tasks)
