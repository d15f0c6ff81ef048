"""Instructions by task: the papers' tables, their wording before a text, files of one's own."""

import pytest

from gerund.errors import ConfigError, DataError
from gerund.evaluation.mteb import TASKS_15
from gerund.evaluation.registry import document_prompts, prompt_set
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.similarity import Sts
from gerund.papers.prompts import LBW, MAGNET

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
