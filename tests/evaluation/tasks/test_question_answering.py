"""Answers measured as SQuAD measures them, and whether they cite the paragraph that they should."""

import json
from dataclasses import replace

import pytest

import gerund
from gerund.errors import ConfigError, DataError
from gerund.evaluation.registry import tasks_in, with_options
from gerund.evaluation.run import key_of
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig
from gerund.evaluation.tasks.question_answering import (
    Ask,
    Question,
    contains,
    exact_match,
    normalised,
    read_questions,
    scored,
    token_f1,
)
from gerund.types import Answer, Source
from tests.retrieval.test_question_answering import chat_model

RAIL = "The first public railway to use steam locomotives was opened in 1825. It ran to Darlington."
BREAD = "Bread is made of flour, water and salt. Yeast makes the dough rise."


def qa(question, *answers, **more):
    return {
        "id": question,
        "question": question,
        "answers": [{"text": one, "answer_start": 0} for one in answers],
        **more,
    }


def squad(*qas, context=RAIL):
    return {"title": "Rail", "paragraphs": [{"context": context, "qas": list(qas)}]}


DATA = [
    squad(qa("When was the first railway opened?", "1825", "in 1825"), qa("Where did it run to?", "Darlington")),
    squad(qa("What makes dough rise?", "Yeast"), qa("What is zebra zinc?", is_impossible=True), context=BREAD),
    squad(qa("Who opened the first public railway?", "nobody", is_impossible=True)),  # the paragraph comes again
]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "ask").mkdir()
    (tmp_path / "ask" / "small.test.json").write_text(json.dumps({"version": "v2.0", "data": DATA}))
    return tmp_path


def test_measures_of_one_answer_are_squads():
    assert normalised("An (old)  man, the sea.") == "old man sea"
    assert exact_match("The 1825!", ["1824", "1825"]) == 1
    assert exact_match("in 1825", ["1825"]) == 0
    assert token_f1("opened in 1825", ["1825"]) == pytest.approx(0.5)
    assert token_f1("a the", ["an"]) == 1
    assert token_f1("x", ["y"]) == token_f1("x", []) == token_f1("the", ["y"]) == 0
    assert token_f1("yes yes no", ["yes no"]) == pytest.approx(0.8)
    assert contains("They say yeast, mostly.", ["Yeast"]) == 1


def test_files_are_read_and_paragraphs_of_one_text_are_one(folder):
    read = read_questions(folder / "ask" / "small.test.json")
    assert [one.text for one in read.paragraphs] == [RAIL, BREAD]
    assert [(one.answers, one.paragraph) for one in read.questions] == [
        (("1825", "in 1825"), "0.0"), (("Darlington",), "0.0"), (("Yeast",), "1.0"), ((), "1.0"), ((), "0.0")
    ]  # fmt: skip


def test_the_score_is_the_formula():
    def answer(text, cited, found=True):
        sources = [Source(1, "a", 0, 1, "x"), Source(2, "b", 0, 1, "x")] if found else []
        return Answer("?", text, found, sources, cited, "generate")

    asked = [Question("?", right, "a") for right in (("1825",), ("1825",), ("1825",), (), ())]
    answers = [answer("1825", [1]), answer("in 1825 it was", [1, 2]), answer("nothing", [], False),
               answer("nothing", [], False), answer("made up", [2])]  # fmt: skip
    score = scored(asked, answers, [])
    assert score.main == "f1"
    assert score.metrics == pytest.approx(
        {"f1": (1 + 0.4 + 0) / 3, "exact_match": 1 / 3, "contains": 2 / 3, "citation_precision": 0.75,
         "citation_recall": 2 / 3, "unanswerable": 0.5}
    )  # fmt: skip
    assert "questions whose answer cites nothing: 1" in score.notes
    assert scored(asked[3:], answers[3:], []).metrics["f1"] == 0


@pytest.mark.slow
def test_the_bundled_model_is_asked(folder, bundled):
    [task] = [one for one in tasks_in(folder) if one.kind == "ask"]
    score = task.run(language_model_system("m", bundled), EvaluationConfig(show_progress=False))
    # "Where did it run to?" shares no word with its paragraph, so it is not answered.
    assert score.metrics["contains"] == score.metrics["citation_recall"] == pytest.approx(2 / 3)
    assert score.metrics["citation_precision"] == 1
    assert score.metrics["unanswerable"] == 0.5  # the railway of the second is in the index
    assert score.size == 5
    assert score.notes[0] == "2 paragraphs, answers: 5 extractive"
    limited = task.run(language_model_system("m", bundled), EvaluationConfig(limit=1, show_progress=False))
    assert limited.size == 1


def test_a_score_depends_on_the_weight_of_vectors(folder, tiny_folder):
    [task] = Ask.find(folder)
    lm = gerund.load(tiny_folder)
    models = [lm.with_encoder(replace(lm.encoder, fusion=weight)) for weight in (0.2, 0.8)]
    first, second = (key_of(task, language_model_system("m", one), EvaluationConfig()) for one in models)
    assert first != second


def test_a_model_that_chats_writes(folder):
    [task] = Ask.find(folder)
    [task] = with_options([task], ["ask.max_new_tokens=4", "ask.chunks=1", "ask.method=generate"])
    system = language_model_system("m", chat_model())
    score = task.run(system, EvaluationConfig(show_progress=False))
    assert score.size == 5  # what is written is noise, and a quotation replaces it
    [quoting] = with_options([task], ["ask.method=extractive"])
    assert "5 extractive" in quoting.run(system, EvaluationConfig(show_progress=False)).notes[0]
    with pytest.raises(ConfigError, match=r"ask\.method is auto"):
        with_options([task], ["ask.method=guess"])
    with pytest.raises(ConfigError, match="1 or more"):
        with_options([task], ["ask.chunks=0"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "expected a JSON object"), ("{}", "needs 'data', a list"), ("{", "JSON"),
        ('{"data": []}', "no question"),
        (json.dumps({"data": [{"paragraphs": 1}]}), r"data\[0\]: needs 'paragraphs'"),
        (json.dumps({"data": [{"paragraphs": [{"context": " ", "qas": []}]}]}), r"paragraphs\[0\]: 'context' is empty"),
        (json.dumps({"data": [squad({"question": 5})]}), r"qas\[0\]"),
        (json.dumps({"data": [squad({"question": "x", "answers": [{}]})]}), r"answers\[0\]"),
    ],
)  # fmt: skip
def test_malformed_files_are_told_by_their_place(tmp_path, content, words):
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(DataError, match=words):
        read_questions(path)
