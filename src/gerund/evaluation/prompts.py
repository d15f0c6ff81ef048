"""Prompts by task: from a YAML file, or a named set (an entry point of the group ``gerund.prompts``)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

import yaml

from gerund.checks import read_input
from gerund.data.yaml_text import parse_yaml
from gerund.errors import ConfigError, DataError, unknown_name
from gerund.evaluation.registry import task_classes

GROUP = "gerund.prompts"
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
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
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
