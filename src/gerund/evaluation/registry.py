"""Find evaluation tasks by their data in a folder or by name, and prompts by task.

Tasks are entry points of the group ``gerund.tasks``, each named after its kind: ``my-kind = "module:MyTask"``. Prompts
are read from a YAML file, or are a named set: an entry point of the group ``gerund.prompts``.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import yaml

from gerund.checks import read_input
from gerund.data.yaml_text import parse_yaml
from gerund.errors import ConfigError, DataError, MissingDependencyError, unknown_name
from gerund.evaluation.task import Task, options_of

GROUP = "gerund.tasks"
SIDES = ("representation", "tokens", "generation")
ALL = "all"
MTEB15 = "MTEB15"
# The order of tables; kinds from elsewhere follow by name.
_ORDER = (
    "sts",
    "pair-classification",
    "retrieval",
    "title-retrieval",
    "book-retrieval",
    "quotation-retrieval",
    "reranking",
    "classification",
    "linear-probe",
    "few-shot",
    "fine-tuning",
    "zero-shot",
    "clustering",
    "chunking",
    "ner",
    "pos",
    "perplexity",
    "infilling",
    "suffix-identification",
    "human-or-generated",
    "writing",
    "ask",
    "lm-eval",
    "mteb",
)


@cache
def task_classes() -> tuple[type[Task], ...]:
    """Return the classes of all tasks, in the order of tables."""
    classes: dict[str, type[Task]] = {entry.name: entry.load() for entry in entry_points(group=GROUP)}
    if "sts" not in classes:
        raise MissingDependencyError("gerund's own tasks are not registered; install it again: pip install gerund")
    known = {kind: classes[kind] for kind in _ORDER if kind in classes}
    return tuple({**known, **{kind: classes[kind] for kind in sorted(classes)}}.values())


def tasks_in(folder: Path | None) -> list[Task]:
    """Return every task whose data are in ``folder``, in the order of tables."""
    if folder is None:
        return []
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder")
    return [task for kind in task_classes() for task in kind.find(folder)]


def unused_files(folder: Path, tasks: Iterable[Task]) -> list[Path]:
    """Return the files in a folder of data that no task uses, training files apart: mostly misspelled names."""
    known = {path for task in tasks for path in task.files}
    folders = dict.fromkeys(kind.data_folder for kind in task_classes() if kind.data_folder)
    paths = (path for name in folders for path in sorted((folder / name).rglob("*")))
    return [path for path in paths if path.is_file() and path not in known and "train" not in path.name]


def select(names: Sequence[str], folder: Path | None) -> list[Task]:
    """Return the tasks that names mean, each once, in the order of tables; those that are fetched come last.

    A name is ``kind/name``, its second half where only one task has it, a kind, a side
    (``representation``, ``tokens``, ``generation``), ``all``, a pattern (``sts/*``), ``MTEB15``, ``mteb/NAME``
    (``mteb/`` may be left out) or ``lm-eval/NAME``. A side and ``all`` leave out what takes very long.

    Raises:
        ConfigError: a name means nothing; near matches are listed.
    """
    local = tasks_in(folder)
    chosen: dict[str, Task] = {}
    fetched: list[Task] = []
    for name in names:
        matching = _local(name, local)
        if not matching:
            fetched += [task for task in _fetched(name, local, folder) if task.name not in chosen]
        chosen |= {task.name: task for task in matching}
    return [task for task in local if task.name in chosen] + list({task.name: task for task in fetched}.values())


def with_options(tasks: Iterable[Task], settings: Sequence[str]) -> list[Task]:
    """Return the tasks with options set, each spelled ``KIND.OPTION=VALUE`` or ``KIND/NAME.OPTION=VALUE``."""
    changed = list(tasks)
    for setting in settings:
        target, _, value = setting.partition("=")
        name, _, option = target.rpartition(".")
        places = [place for place, task in enumerate(changed) if name in (task.kind, task.name)]
        if not places or not value:
            kinds = sorted({task.kind for task in changed})
            raise ConfigError(
                f"{setting!r} sets nothing; write KIND.OPTION=VALUE with a kind among: {', '.join(kinds)}"
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
    """Read ``value`` as the type of ``example``; where that is None, as a whole number."""
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
        if matching := [task for task in tasks if fits(task)]:
            return matching
    titled = [task for task in tasks if task.title == name]
    if len(titled) > 1:
        raise ConfigError(f"{name!r} may be {', '.join(task.name for task in titled)}; give one, or kind/*")
    return titled


def _fetched(name: str, local: list[Task], folder: Path | None) -> list[Task]:
    """Return the tasks of a name that is not in the folder: from MTEB, lm-evaluation-harness or a kind like them."""
    classes = {kind.kind: kind for kind in task_classes()}
    mteb = classes["mteb"]
    if name == MTEB15:
        from gerund.evaluation.mteb import TASKS_15

        mteb.known_names()  # fails where mteb is not installed
        return [mteb(name=f"mteb/{title}") for title in TASKS_15]
    prefix, slash, bare = name.partition("/")
    if slash and prefix in classes and (known := classes[prefix].known_names()):
        if bare in known:
            return [classes[prefix](name=name)]
        raise ConfigError(f"unknown task {name!r}{_near(bare, known, f'{prefix}/')}")
    close = _near(name, [text for task in local for text in (task.name, task.title, task.kind)])
    if slash or close or name in classes.keys() - {"mteb"}:
        raise ConfigError(f"unknown task {name!r}{close or _where(folder, local)}")
    if name in mteb.known_names():
        return [mteb(name=f"mteb/{name}")]
    # The data come first: more often they are missing than one of MTEB's tasks is meant.
    raise ConfigError(f"unknown task {name!r}{_where(folder, local)}{_near(name, mteb.known_names(), 'mteb/')}")


def _near(name: str, offered: Iterable[str], prefix: str = "") -> str:
    lower = {item.lower(): item for item in offered}
    close = difflib.get_close_matches(name.lower(), list(lower), n=4, cutoff=0.6)
    return f"; did you mean {', '.join(prefix + lower[item] for item in close)}?" if close else ""


def _where(folder: Path | None, local: list[Task]) -> str:
    if folder is None:
        return "; give --data FOLDER for tasks on local data, or an MTEB name"
    if not local:
        return f"; {folder} holds no data of any task; docs/reference/evaluation.md says what such a folder looks like"
    return f"; gerund eval --list --data {folder} shows what is there"


PROMPT_GROUP = "gerund.prompts"
STS = "STS*"
"""Stands for every STS task in a set."""
_STS_TASKS = ("BIOSSES", "SICK-R")
_NONE = "none"
_YAML_ENDINGS = (".yaml", ".yml")


@dataclass(frozen=True)
class PromptSet:
    """Instructions by MTEB's names of tasks."""

    instructions: Mapping[str, str]  # by task; ``STS`` is for all STS tasks
    form: str  # how an instruction stands before a text, with ``{}`` for it
    # Those of MTEB's tasks whose documents get the instruction as well as their queries.
    documents: tuple[str, ...] = ()

    def for_tasks(self, tasks: Sequence[str]) -> dict[str, str]:
        """Return the prompts of those tasks that have one."""
        texts = {task: self._instruction(task) for task in tasks}
        return {task: self.form.format(instruction) for task, instruction in texts.items() if instruction is not None}

    def _instruction(self, task: str) -> str | None:
        kind, _, title = task.partition("/")
        if kind == "mteb":
            is_sts = title.startswith("STS") or title in _STS_TASKS
            return self.instructions.get(STS if is_sts else title)
        if kind == "sts":
            return self.instructions.get(STS)
        core = _core(title, kind)
        return next((text for name, text in self.instructions.items() if _core(name, kind) == core), None)


def prompt_set(name: str | Path, task_names: Sequence[str]) -> Mapping[str, str]:
    """Return the prompts of tasks (``kind/name``), ready for ``EvaluationConfig.prompts``.

    A set's instruction goes to the task of that name (``mteb/Banking77Classification``) and to local tasks
    of that name, with or without their kind and in any spelling (``classification/banking77``,
    ``clustering/twentynewsgroups``, ``retrieval/nfcorpus``); every STS task has the set's one for STS. Tasks
    without an instruction get none and are encoded with the encoder's own prompt. ``name`` is ``none``, a set's, or
    a YAML file with a mapping from task or kind to the prompt as it stands before the text.

    >>> prompt_set("magnet", ["sts/stsb", "retrieval/cranfield"])
    {'sts/stsb': 'Retrieve semantically similar text: '}
    """
    if Path(name).suffix.lower() in _YAML_ENDINGS:
        return _from_file(Path(name), task_names)
    prompts = _named(str(name))
    return {} if prompts is None else prompts.for_tasks(task_names)


def document_prompts(name: str | Path, task_names: Sequence[str]) -> Mapping[str, str]:
    """Return the prompts for documents where a task's have one too, ready for ``EvaluationConfig.document_prompts``.

    >>> list(document_prompts("lbw", ["mteb/SciDocsRR", "mteb/SciFact"]))
    ['mteb/SciDocsRR']
    """
    prompts = None if Path(name).suffix.lower() in _YAML_ENDINGS else _named(str(name))
    documents = [] if prompts is None else [f"mteb/{title}" for title in prompts.documents]
    return {} if prompts is None else prompts.for_tasks([task for task in task_names if task in documents])


def _named(name: str) -> PromptSet | None:
    if name == _NONE:
        return None
    known = {entry.name: entry for entry in entry_points(group=PROMPT_GROUP)}
    if name not in known:
        raise unknown_name("set of prompts", name, [_NONE, *sorted(known), "a YAML file"])
    prompts: PromptSet = known[name].load()
    return prompts


def _core(name: str, kind: str) -> str:
    """Return a task's name without its kind, capitals and signs.

    >>> _core("Banking77Classification", "classification"), _core("stack-overflow", "clustering")
    ('banking77', 'stackoverflow')
    """
    return "".join(letter for letter in name.lower() if letter.isalnum()).replace(kind, "")


def _from_file(path: Path, task_names: Sequence[str]) -> dict[str, str]:
    try:
        content = parse_yaml(read_input(path))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({getattr(error, 'strerror', None) or error})") from error
    except yaml.YAMLError as error:
        raise DataError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: prompts are a mapping from task or kind to text")
    prompted = [task.kind for task in task_classes() if task.reads_plan]
    kinds = list(dict.fromkeys([*prompted, *(task.partition("/")[0] for task in task_names)]))
    for key, prompt in content.items():
        if not isinstance(key, str) or not isinstance(prompt, str):
            raise ConfigError(f"{path}: the prompt of {key!r} is not a text")
        if key.partition("/")[0] not in kinds:
            raise unknown_name(f"task or kind in {path}", key, [*kinds, "kind/name"])
    return content
