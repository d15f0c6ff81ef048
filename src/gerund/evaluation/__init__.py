"""Evaluate embeddings and generation with the field's own evaluators (MTEB, lm-evaluation-harness).

>>> from gerund.evaluation import EvaluationConfig, evaluate, select, systems_of
>>> select(["sts/stsb"], None)
Traceback (most recent call last):
...
gerund.errors.ConfigError: unknown task 'sts/stsb'; give --data FOLDER for tasks on local data, or an MTEB name
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gerund.evaluation.mteb import MTEBEncoder as MTEBEncoder
    from gerund.evaluation.registry import select as select
    from gerund.evaluation.registry import tasks_in as tasks_in
    from gerund.evaluation.run import evaluate as evaluate
    from gerund.evaluation.systems.selection import systems_of as systems_of
    from gerund.evaluation.task import EvaluationConfig as EvaluationConfig
    from gerund.evaluation.task import Score as Score
    from gerund.evaluation.task import Task as Task
    from gerund.evaluation.tasks.lm_eval import lm_eval_model as lm_eval_model
    from gerund.evaluation.tuning import tune as tune

# Imported on first use: mteb alone takes seconds.
_WHERE = {
    "EvaluationConfig": "task",
    "MTEBEncoder": "mteb",
    "Score": "task",
    "Task": "task",
    "evaluate": "run",
    "lm_eval_model": "tasks.lm_eval",
    "select": "registry",
    "systems_of": "systems.selection",
    "tasks_in": "registry",
    "tune": "tuning",
}

__all__ = list(_WHERE)


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gerund.evaluation' has no attribute {name!r}")
    return getattr(import_module(f"gerund.evaluation.{_WHERE[name]}"), name)
