"""A task from another package is one class and one entry point."""

import json

import pytest

import gerund
from gerund.errors import ConfigError
from gerund.evaluation.registry import (
    option_help,
    prompt_set,
    select,
    task_classes,
    tasks_in,
    unused_files,
    with_options,
)
from gerund.evaluation.run import evaluate
from gerund.evaluation.systems.base import CAPABILITIES
from gerund.evaluation.systems.selection import systems_of
from tests.cli.helpers import run_cli

MODULE = '''
"""How long the texts of a file are."""

from dataclasses import dataclass, field
from typing import ClassVar

from gerund.errors import ConfigError
from gerund.evaluation.data_files import read_json_lines
from gerund.evaluation.systems.base import Encodes
from gerund.evaluation.task import FileTask, Score


@dataclass(frozen=True, kw_only=True)
class Length(FileTask):
    """Mean length of a vector."""

    kind: ClassVar = "length"
    side: ClassVar = "representation"
    requires: ClassVar = Encodes
    data_folder: ClassVar = "length"

    power: float = field(default=1.0, metadata={"help": "The length is raised to it."})

    @classmethod
    def find(cls, folder):
        paths = sorted(folder.glob("length/*.test.jsonl"))
        return [cls(name=f"length/{path.name.split('.')[0]}", files=(path,)) for path in paths]

    def __post_init__(self):
        if self.power <= 0:
            raise ConfigError(f"length.power={self.power} is not above 0")

    def texts(self, config):
        return [row.text("text") for row in read_json_lines(self.scored_file(config))][: config.limit]

    def run(self, system, config):
        vectors = system.encode(self.texts(config), prompt=self.prompt(config))
        lengths = (vectors**2).sum(axis=1) ** (self.power / 2)
        return Score("length", {"length": float(lengths.mean())}, size=len(vectors))
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    package = tmp_path / "site"
    (package / "other-1.0.dist-info").mkdir(parents=True)
    (package / "other-1.0.dist-info" / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    (package / "other-1.0.dist-info" / "entry_points.txt").write_text("[gerund.tasks]\nlength = other_tasks:Length\n")
    (package / "other_tasks.py").write_text(MODULE)
    monkeypatch.syspath_prepend(package)
    task_classes.cache_clear()
    (tmp_path / "length").mkdir()
    for name in ("mine.test.jsonl", "mine.other.jsonl"):
        rows = [{"text": "a cat"}, {"text": "an inn"}]
        (tmp_path / "length" / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    yield tmp_path
    task_classes.cache_clear()


def test_it_is_found_named_configured_measured_and_listed(folder, tiny_folder):
    [task] = tasks_in(folder)
    assert task.name == "length/mine"
    for name in ("length/mine", "mine", "length", "representation", "all", "len*/m*"):
        assert select([name], folder) == [task]
    assert option_help(task) == {"power": "The length is raised to it."}
    [squared] = with_options([task], ["length.power=2"])
    with pytest.raises(ConfigError, match=r"length.power=-1.0 is not above 0"):
        with_options([task], ["length.power=-1"])
    assert [path.name for path in unused_files(folder, [task])] == ["mine.other.jsonl"]
    lm = gerund.load(tiny_folder)
    first, second = (evaluate(systems_of([lm]), [one]).results[0].score.value for one in (task, squared))
    assert 0 < first**2 <= second * (1 + 1e-6)
    with pytest.raises(ConfigError, match="can encode whole texts, and bm25 can only rank documents"):
        evaluate(systems_of(["bm25"]), [task])
    listed = run_cli("eval", "--list", "--data", folder).out
    assert "length/mine" in listed
    assert "--set length.power=1.0  The length is raised to it." in listed


def test_a_file_of_prompts_may_name_it(folder, tmp_path):
    (tmp_path / "prompts.yaml").write_text("length: 'Read: '\n")
    assert prompt_set(tmp_path / "prompts.yaml", ["sts/stsb"]) == {"length": "Read: "}


def test_without_its_data_it_is_known_all_the_same(folder):
    with pytest.raises(ConfigError, match="unknown task 'length'; give --data FOLDER"):
        select(["length"], None)


def test_every_task_says_what_it_requires():
    classes = task_classes()
    assert {one.kind for one in classes} >= {"sts", "ner", "infilling", "writing", "lm-eval", "mteb"}
    assert {one.requires for one in classes} <= set(CAPABILITIES)
