"""The instructions that papers put before texts, by task.

Knows: the papers' tables, files of prompts, which of our tasks are which of MTEB's. Does not know: models.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from gerund.checks import read_input
from gerund.data.yaml_text import parse_yaml
from gerund.errors import ConfigError, DataError, unknown_name
from gerund.evaluation.registry import task_classes

_STS = "STS*"
_STS_TASKS = ("BIOSSES", "SICK-R")
_SYMMETRIC = ("SciDocsRR", "StackOverflowDupQuestions")
_TWENTY = "TwentyNewsgroupsClustering"

LBW: Mapping[str, str] = {
    "ArguAna": "Given a claim, find documents that refute the claim.",
    "NFCorpus": "Given a question, retrieve relevant documents that best answer the question.",
    "SciFact": "Given a scientific claim, retrieve documents that support or refute the claim.",
    "SciDocsRR": "Given a title of a scientific paper, retrieve the titles of other relevant papers.",
    "StackOverflowDupQuestions": "Retrieve duplicate questions from StackOverflow forum.",
    "BiorxivClusteringS2S": "Identify the main category of Biorxiv papers based on the titles.",
    "MedrxivClusteringS2S": "Identify the main category of Medrxiv papers based on the titles.",
    # Not in the paper's table though among its tasks: the instruction of its source (Wang et al., 2023), which
    # is MAGNET's as well.
    _TWENTY: "Identify the topic or theme of the given news articles.",
    "SprintDuplicateQuestions": "Retrieve duplicate questions from Sprint forum.",
    "Banking77Classification": "Given an online banking query, find the corresponding intents.",
    "EmotionClassification": (
        "Classify the emotion expressed in the given Twitter message into one of the six emotions: anger, fear, joy, "
        "love, sadness, and surprise."
    ),
    "MassiveIntentClassification": "Given a user utterance as query, find the user intents.",
    _STS: "Retrieve semantically similar text.",
}
"""Look Both Ways, appendix B, table 3; ``STS*`` stands for every STS task."""

MAGNET: Mapping[str, str] = {
    _STS: "Retrieve semantically similar text",
    "BiorxivClusteringP2P": "Identify the main category of Biorxiv papers based on the titles and abstracts",
    "BiorxivClusteringS2S": "Identify the main category of Biorxiv papers based on the titles",
    _TWENTY: "Identify the topic or theme of the given news articles",
    "MedrxivClusteringP2P": "Identify the main category of Medrxiv papers based on the titles and abstracts",
    "MedrxivClusteringS2S": "Identify the main category of Medrxiv papers based on the titles",
}
"""MAGNET, appendix E, table 8."""

# How an instruction stands before a text. Look Both Ways: its released code. MAGNET does not say; its one
# instruction in training ("Given the sentence, find its representation:") and LLM2Vec, which it builds on, end
# with a colon.
_SETS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "lbw": (LBW, "Instruct: {}\nQuery: "),
    "magnet": (MAGNET, "{}: "),
}
_NONE = "none"
_FILES = (".yaml", ".yml")


def prompt_set(name: str | Path, task_names: Sequence[str]) -> Mapping[str, str]:
    """Return the prompts of tasks, ready for ``EvaluationConfig.prompts``.

    A paper's instruction goes to the task of that name (``mteb/Banking77Classification``) and to local tasks
    that are called so, with or without their kind and in any spelling (``classification/banking77``,
    ``clustering/twentynewsgroups``, ``retrieval/nfcorpus``); every STS task has the papers' one for STS. Tasks
    without an instruction get none and are encoded with the encoder's own prompt.

    Args:
        name: ``none``, ``lbw``, ``magnet``, or a YAML file with a mapping from task or kind to the prompt as it
            stands before the text.
        task_names: the tasks that are asked for, ``kind/name``.

    Raises:
        ConfigError: an unknown name, or a file that maps what is no task.
        DataError: the file is missing or no YAML.

    >>> prompt_set("magnet", ["sts/stsb", "retrieval/cranfield"])
    {'sts/stsb': 'Retrieve semantically similar text: '}
    """
    if str(name) == _NONE:
        return {}
    if Path(name).suffix.lower() in _FILES:
        return _from_file(Path(name), task_names)
    if str(name) not in _SETS:
        raise unknown_name("set of prompts", str(name), [_NONE, *_SETS, "a YAML file"])
    instructions, form = _SETS[str(name)]
    found = {task: _instruction(task, instructions) for task in task_names}
    return {task: form.format(instruction) for task, instruction in found.items() if instruction is not None}


def document_prompts(name: str | Path, task_names: Sequence[str]) -> Mapping[str, str]:
    """Return the prompts of the tasks whose documents have one too, ready for ``EvaluationConfig.document_prompts``.

    LBW's released code puts the instruction of its two re-ranking tasks, SciDocsRR and StackOverflowDupQuestions,
    before their documents as well as their queries: what is ranked are titles and questions like those that are asked.

    >>> list(document_prompts("lbw", ["mteb/SciDocsRR", "mteb/SciFact"]))
    ['mteb/SciDocsRR']
    """
    if str(name) != "lbw":
        return {}
    wanted = [task for task in task_names if task.partition("/")[2] in _SYMMETRIC and task.startswith("mteb/")]
    return prompt_set(name, wanted)


def _instruction(task: str, instructions: Mapping[str, str]) -> str | None:
    kind, _, title = task.partition("/")
    if kind == "mteb":
        is_sts = title.startswith("STS") or title in _STS_TASKS
        return instructions.get(_STS if is_sts else title)
    if kind == "sts":
        return instructions[_STS]
    wanted = _core(title, kind)
    return next((text for name, text in instructions.items() if _core(name, kind) == wanted), None)


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
    prompted = [one.kind for one in task_classes() if one.reads_plan]
    kinds = list(dict.fromkeys([*prompted, *(task.partition("/")[0] for task in task_names)]))
    for key, prompt in content.items():
        if not isinstance(key, str) or not isinstance(prompt, str):
            raise ConfigError(f"{path}: the prompt of {key!r} is no text")
        if key.partition("/")[0] not in kinds:
            raise unknown_name(f"task or kind in {path}", key, [*kinds, "kind/name"])
    return content
