"""Tasks and prompts by name: a task of another package, the papers' instructions, files of one's own."""

import json

import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.mteb import TASKS_15
from gerund.evaluation.registry import (
    document_prompts,
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
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.similarity import Sts
from gerund.papers.prompts import LBW, MAGNET
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


LOCAL = ["sts/stsb", "classification/banking77", "clustering/twentynewsgroups", "retrieval/cranfield", "ner/conll2003"]


def test_none_has_no_prompts():
    assert prompt_set("none", LOCAL) == {}


def test_look_both_ways_wraps_its_instructions():
    assert prompt_set("lbw", LOCAL) == {
        "sts/stsb": "Instruct: Retrieve semantically similar text.\nQuery: ",
        "classification/banking77": (
            "Instruct: Given an online banking query, find the corresponding intents.\nQuery: "
        ),
        "clustering/twentynewsgroups": ("Instruct: Identify the topic or theme of the given news articles.\nQuery: "),
    }


def test_documents_of_two_tasks_get_the_instruction_too():
    names = ["mteb/SciDocsRR", "mteb/StackOverflowDupQuestions", "mteb/SciFact", "sts/stsb"]
    assert document_prompts("lbw", names) == {
        "mteb/SciDocsRR": (
            "Instruct: Given a title of a scientific paper, retrieve the titles of other relevant papers.\nQuery: "
        ),
        "mteb/StackOverflowDupQuestions": "Instruct: Retrieve duplicate questions from StackOverflow forum.\nQuery: ",
    }
    assert document_prompts("magnet", names) == document_prompts("none", names) == {}
    assert "document_prompts" not in EvaluationConfig().to_dict()  # so that scores of before count


def test_magnet_puts_them_before_a_colon():
    assert prompt_set("magnet", LOCAL) == {
        "sts/stsb": "Retrieve semantically similar text: ",
        "clustering/twentynewsgroups": "Identify the topic or theme of the given news articles: ",
    }


def test_every_task_of_the_fifteen_has_one_in_look_both_ways():
    names = [f"mteb/{name}" for name in TASKS_15]
    found = prompt_set("lbw", names)
    assert list(found) == names
    assert found["mteb/STS17"] == found["mteb/SICK-R"] == found["mteb/STSBenchmark"]
    assert len(set(found.values())) == 13
    assert len(LBW.instructions) == 13
    assert len(MAGNET.instructions) == 6


@pytest.mark.parametrize(
    "task, word",
    [
        ("retrieval/nfcorpus", "question"),
        ("reranking/SciDocsRR", "title"),
        ("pair-classification/sprint-duplicate-questions", "Sprint"),
        ("clustering/biorxiv_s2s", "Biorxiv"),
        ("clustering/BiorxivClusteringS2S", "Biorxiv"),
        ("classification/massive_intent", "utterance"),
    ],
)
def test_local_tasks_are_recognised_in_any_spelling(task, word):
    assert word in prompt_set("lbw", [task])[task]


def test_the_name_must_be_of_the_kind():
    assert prompt_set("lbw", ["clustering/banking77", "classification/twentynewsgroups", "mteb/Banking"]) == {}


def test_an_unknown_set_is_refused_with_the_valid_ones():
    with pytest.raises(ConfigError, match="unknown set of prompts 'e5'; valid are: none, lbw, magnet, a YAML file"):
        prompt_set("e5", LOCAL)


def test_prompts_from_a_file_stand_as_they_are(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text('sts: "Similar? "\nretrieval/cranfield: query\nperplexity: ""\n')
    found = prompt_set(path, [*LOCAL, "perplexity/wiki"])
    assert found == {"sts": "Similar? ", "retrieval/cranfield": "query", "perplexity": ""}
    assert prompt_set(str(path), [*LOCAL, "perplexity/wiki"]) == found
    assert Sts(name="sts/stsb").prompt(EvaluationConfig(prompts=found)) == "Similar? "


@pytest.mark.parametrize(
    "content, said",
    [
        ("stss: x", "unknown task or kind in .*mine.yaml 'stss'; valid are: sts, pair-classification"),
        ("sts: 5", "the prompt of 'sts' is not a text"),
        ("5: x", "the prompt of 5 is not a text"),
        ("- sts", "a mapping from task or kind to text"),
        ("", "a mapping from task or kind to text"),
    ],
)
def test_files_that_map_no_task_to_a_text_are_refused(tmp_path, content, said):
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=said):
        prompt_set(path, LOCAL)


def test_files_that_are_missing_or_no_yaml_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"mine.yml: cannot be read \(No such file"):
        prompt_set(tmp_path / "mine.yml", LOCAL)
    for content in ("a: [", "a: 2024-13-01", f"a: {'1' * 4301}", "[" * 3000):
        (tmp_path / "mine.yml").write_text(content)
        with pytest.raises(DataError, match=r"mine.yml: not valid YAML"):
            prompt_set(tmp_path / "mine.yml", LOCAL)
    (tmp_path / "mine.yml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"mine.yml: "):
        prompt_set(tmp_path / "mine.yml", LOCAL)
