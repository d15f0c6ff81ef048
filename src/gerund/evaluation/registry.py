"""Which tasks there are, which of them a folder of data holds, and which a name means.

A task is made known by the name of its module in ``TASKS``; what else is to be known, its module says.

Knows: the modules of tasks, names. Does not know: how anything is measured.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path
from typing import Any

from gerund.errors import ConfigError, DataError
from gerund.evaluation.results import options_of
from gerund.evaluation.task import Task

TASKS = (
    "sts",
    "pair_classification",
    "retrieval",
    "title_retrieval",
    "book_retrieval",
    "quotation_retrieval",
    "reranking",
    "classification",
    "linear_probe",
    "few_shot",
    "fine_tuning",
    "zero_shot",
    "clustering",
    "token_labels",
    "perplexity",
    "infilling_perplexity",
    "suffix_identification",
    "human_or_generated",
    "writing",
    "cited_answers",
    "lm_eval",
)
"""Modules in ``tasks``, in the order of tables."""

SIDES = ("representation", "tokens", "generation")
ALL = "all"
# Modules whose tasks are fetched by name, by their kind.
_FETCHED = {"mteb": "mteb", "lm-eval": "lm_eval"}
MTEB15 = "MTEB15"


def tasks_in(folder: Path | None) -> list[Task]:
    """Return every task whose data lie in ``folder``, in the order of tables.

    Raises:
        DataError: there is no such folder.
    """
    if folder is None:
        return []
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    return [task for name in TASKS for task in _module(name).find(folder)]


def task_classes() -> list[type[Task]]:
    """Return the classes of tasks that have a kind, in the order of tables; those that are only fetched come last."""
    modules = [_module(name) for name in dict.fromkeys((*TASKS, *_FETCHED.values()))]
    return [
        item
        for module in modules
        for item in vars(module).values()
        if isinstance(item, type)
        and issubclass(item, Task)
        and item.__module__ == module.__name__
        and hasattr(item, "kind")
    ]


def unused_files(folder: Path, tasks: Iterable[Task]) -> list[Path]:
    """Return the files in a folder of data that no task uses, training files apart: mostly slips in a name."""
    known = {path for task in tasks for path in task.files}
    folders = dict.fromkeys(one.data_folder for one in task_classes() if one.data_folder)
    found = (path for own in folders for path in sorted((folder / own).rglob("*")))
    return [path for path in found if path.is_file() and path not in known and "train" not in path.name]


def select(names: Sequence[str], folder: Path | None) -> list[Task]:
    """Return the tasks that names mean, each once, in the order of tables; those that are fetched come last.

    A name is ``kind/name``, its second half where that is one task's alone, a kind, a side
    (``representation``, ``tokens``, ``generation``), ``all``, a pattern (``sts/*``), ``MTEB15``, ``mteb/NAME``
    (``mteb/`` may be left out) or ``lm-eval/NAME``. A side and ``all`` leave out what takes very long.

    Raises:
        ConfigError: a name means nothing; near matches are listed.
    """
    local = tasks_in(folder)
    chosen: dict[str, Task] = {}
    fetched: list[Task] = []
    for name in names:
        found = _local(name, local)
        if not found:
            fetched += [task for task in _fetched(name, local, folder) if task.name not in chosen]
        chosen |= {task.name: task for task in found}
    return [task for task in local if task.name in chosen] + list({task.name: task for task in fetched}.values())


def with_options(tasks: Iterable[Task], settings: Sequence[str]) -> list[Task]:
    """Return the tasks with options put in, each spelled ``KIND.OPTION=VALUE`` or ``KIND/NAME.OPTION=VALUE``.

    Raises:
        ConfigError: no task of that name is among them, an unknown option, or a value of another kind.
    """
    changed = list(tasks)
    for setting in settings:
        target, _, value = setting.partition("=")
        named, _, option = target.rpartition(".")
        places = [place for place, task in enumerate(changed) if named in (task.kind, task.name)]
        if not places or not value:
            names = sorted({task.kind for task in changed})
            raise ConfigError(
                f"{setting!r} sets nothing; write KIND.OPTION=VALUE with a kind among: {', '.join(names)}"
            )
        for place in places:
            changed[place] = _with_option(changed[place], option, value)
    return changed


def _with_option(task: Task, option: str, value: str) -> Task:
    known = options_of(task)
    if option not in known:
        raise ConfigError(f"{task.kind} has no option {option!r}; valid are: {', '.join(known) or 'none'}")
    return replace(task, **{option: _parsed(known[option], value, f"{task.kind}.{option}")})


def _parsed(example: Any, value: str, name: str) -> Any:
    """Read ``value`` as what ``example`` is."""
    if isinstance(example, bool):
        if value not in ("true", "false"):
            raise ConfigError(f"{name} is true or false, not {value!r}")
        return value == "true"
    kind = type(example) if example is not None else int
    try:
        return kind(value)
    except ValueError:
        raise ConfigError(f"{name} is a number such as {example}, not {value!r}") from None


def option_help(task: Task) -> dict[str, str]:
    """Return what each option of a task means."""
    return {item.name: item.metadata["help"] for item in fields(task) if "help" in item.metadata}


def _local(name: str, tasks: list[Task]) -> list[Task]:
    if name == ALL:
        return [task for task in tasks if task.in_all and not task.by_name_only]
    for fits in (
        lambda task: task.name == name,
        lambda task: name == task.kind or (name == task.side and not task.by_name_only),
        lambda task: fnmatchcase(task.name, name),
    ):
        if found := [task for task in tasks if fits(task)]:
            return found
    titled = [task for task in tasks if task.title == name]
    if len(titled) > 1:
        raise ConfigError(f"{name!r} may be {', '.join(task.name for task in titled)}; give one, or kind/*")
    return titled


def _fetched(name: str, local: list[Task], folder: Path | None) -> list[Task]:
    """Return the tasks of a name that is none of the folder's: from MTEB or lm-evaluation-harness."""
    prefix, slash, bare = name.partition("/")
    if slash and prefix in _FETCHED:
        module = _module(_FETCHED[prefix])
        if bare in module.known_names():
            return list(module.named_tasks([bare]))
        raise ConfigError(f"unknown task {name!r}{_near(bare, module.known_names(), f'{prefix}/')}")
    if name == MTEB15:
        return list(_module("mteb").named_tasks([MTEB15]))
    offered = [task.name for task in local] + [task.title for task in local] + [task.kind for task in local]
    close = _near(name, offered)
    if slash or close or name in {one.kind for one in task_classes()} - {"mteb"}:
        raise ConfigError(f"unknown task {name!r}{close or _where(folder, local)}")
    mteb = _module("mteb")
    if name in mteb.known_names():
        return list(mteb.named_tasks([name]))
    # The data come first: more often it is they that are missing than that one of MTEB's is meant.
    raise ConfigError(f"unknown task {name!r}{_where(folder, local)}{_near(name, mteb.known_names(), 'mteb/')}")


def _near(name: str, offered: Iterable[str], prefix: str = "") -> str:
    lower = {item.lower(): item for item in offered}
    found = difflib.get_close_matches(name.lower(), list(lower), n=4, cutoff=0.6)
    return f"; did you mean {', '.join(prefix + lower[item] for item in found)}?" if found else ""


def _where(folder: Path | None, local: list[Task]) -> str:
    if folder is None:
        return "; give --data FOLDER for tasks on local data, or an MTEB name"
    if not local:
        return f"; {folder} holds no data of any task; docs/reference/evaluation.md says what such a folder looks like"
    return f"; gerund eval --list --data {folder} shows what is there"


def _module(name: str) -> Any:
    return import_module(f"gerund.evaluation.tasks.{name}")
