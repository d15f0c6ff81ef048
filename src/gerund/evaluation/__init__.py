"""Measures both sides of the trade, representation and generation, with the field's own evaluators.

>>> from gerund.evaluation import Settings, evaluate, contenders_of, select
>>> select(["sts/stsb"], None)
Traceback (most recent call last):
...
gerund.errors.ConfigError: unknown task 'sts/stsb'; give --data FOLDER for tasks on local data, or an MTEB name
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gerund.evaluation.lm_eval import lm_eval_model
    from gerund.evaluation.mteb_encoder import MTEBEncoder
    from gerund.evaluation.registry import select, tasks_in
    from gerund.evaluation.run import contenders_of, evaluate
    from gerund.evaluation.task import Score, Settings, Task
    from gerund.evaluation.tuning import tune

# Imported on first use: mteb alone takes seconds.
_WHERE = {
    "MTEBEncoder": "mteb_encoder",
    "Score": "task",
    "Settings": "task",
    "Task": "task",
    "contenders_of": "run",
    "evaluate": "run",
    "lm_eval_model": "lm_eval",
    "select": "registry",
    "tasks_in": "registry",
    "tune": "tuning",
}

__all__ = [
    "MTEBEncoder",
    "Score",
    "Settings",
    "Task",
    "contenders_of",
    "evaluate",
    "lm_eval_model",
    "select",
    "tasks_in",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'gerund.evaluation' has no attribute {name!r}")
    return getattr(import_module(f"gerund.evaluation.{_WHERE[name]}"), name)
