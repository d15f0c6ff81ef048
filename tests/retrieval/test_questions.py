"""Questions that a model writes: read out of its text, filtered by a search, and used to choose the weight."""

import json

import pytest

import gerund
from gerund.adaptation.config import PAIRS, AdaptConfig, Base, Machine, settings_for
from gerund.adaptation.data import make_pairs, split_documents
from gerund.errors import ConfigError, DataError
from gerund.retrieval import questions
from gerund.retrieval.documents import Chunking, Document
from gerund.retrieval.questions import (
    QUESTIONS,
    Passage,
    WeightChoice,
    _questions,
    index_of,
    mined,
    question_in,
    write_questions,
)
from gerund.types import Generation
from tests.adaptation.made_up import documents
from tests.cli.helpers import run_cli
from tests.retrieval.helpers import NOTES, notes_index, write_notes


def as_documents(count=70):
    return [Document(f"t.jsonl#{row['id']}", row["text"], row["title"]) for row in documents(count)]


@pytest.mark.parametrize(
    ("written", "question"),
    [
        ("What is bread made of?", "What is bread made of?"),
        ('\n Question: "What is bread\tmade of?" It is flour.', "What is bread made of?"),
        ('- What is a "rye" bread made of? Or?\nWhy?', "What is a rye bread made of?"),
        ("Bread is made of flour.", None),
        ("Bread is made.\nWhat is bread made of?", None),
        ("面包是用什么做的？用面粉。", "面包是用什么做的?"),
        ("什么？", None),
        ("Why not?", None),
        ("What " + "is " * 40 + "it?", None),
        ("", None),
    ],
)
def test_a_question_is_read_out_of_what_was_written(written, question):
    assert question_in(written) == question


def test_a_question_stays_if_a_search_by_it_finds_its_document(bundled):
    texts = ["Bread is baked of flour and water.", "Trains run on rails of steel.", "Rain falls from clouds."]
    index = index_of(bundled, [Document(name, text) for name, text in zip("abc", texts, strict=True)], Chunking())
    asked = [("What is bread baked of?", Passage(texts[0], "a")), ("What do trains run on?", Passage(texts[0], "a"))]
    [kept] = mined(index, asked, place=1)
    assert (kept.question, kept.passage) == (asked[0][0], texts[0])
    assert set(kept.negatives) == set(texts[1:])
    # What ranks before the document may answer the question too.
    [_, lower] = mined(index, asked)
    assert lower.passage == texts[0]
    assert texts[1] not in lower.negatives


def scripted(monkeypatch, lm, text_for):
    """Let the model write what a function says of its prompt."""

    def generate(prompts, *_arguments, n, **_settings):
        return [Generation(text_for(str(prompt), number), [], 0.0, True) for prompt in prompts for number in range(n)]

    monkeypatch.setattr(lm, "generate", generate)


def name_in(prompt):
    """The thing that a made-up document is about."""
    last = prompt.rsplit("Text:", 1)[-1]
    return last.split("in ", 1)[1].split("with ", 1)[-1].split(".")[0]


def test_pairs_have_questions_and_hard_negatives(tmp_path, bundled, monkeypatch):
    options = AdaptConfig(write_questions=True)
    split = split_documents(as_documents(), options)
    scripted(monkeypatch, bundled, lambda prompt, n: f"What happened to the {name_in(prompt)}?" if not n else "No.")
    pairs = make_pairs(split, tmp_path, options, bundled, show=False)
    rows = [json.loads(line) for line in (tmp_path / PAIRS).read_text().splitlines()]
    assert {row["kind"] for row in rows} == {"questions", "chunks"}
    assert pairs.count == len(rows)
    assert pairs.questions <= pairs.written <= len(split.training)
    held_out = {document.text for document in split.held_out}
    for row in rows:
        assert row["negatives"]
        assert row["text_b"] not in row["negatives"]
        assert not held_out & {row["text_b"], *row["negatives"]}


def test_a_model_that_cannot_ask_is_told(tmp_path, bundled, monkeypatch):
    options = AdaptConfig(write_questions=True)
    scripted(monkeypatch, bundled, lambda *_: "Nothing comes to mind.")
    with pytest.raises(DataError, match=r"the model wrote 0 questions to .* take an instruction-tuned model"):
        make_pairs(split_documents(as_documents(), options), tmp_path, options, bundled, show=False)


def test_equal_seeds_write_equal_questions(bundled, monkeypatch):
    passages = [Passage("The cat sat in the rain.", "a"), Passage("An inn is near the end.", "b")]
    index = index_of(bundled, [Document(one.source, one.text) for one in passages], Chunking())
    monkeypatch.setattr(questions, "question_in", lambda text: f"{text} cat inn")
    found = [write_questions(bundled, passages, index, seed=seed, show=False) for seed in (0, 0, 1)]
    assert found[0] == found[1]
    assert found[0].written >= 2


def test_the_recipe_takes_hard_negatives(tmp_path):
    base = Base("m", 10**9, 16, 2048, 32000, False, 4096)
    settings = settings_for(base, Machine("cpu", 8000), AdaptConfig(write_questions=True), tmp_path, tmp_path)
    [objective] = settings["objectives"]
    assert (objective["kind"], objective["hard_negatives"], objective["batch_size"]) == ("contrastive", 1, 16)
    with pytest.raises(ConfigError, match="write_questions"):
        AdaptConfig(write_questions="yes")


QUESTIONS_BY_HAND = {"bread": "Question: How is bread made?", "rail": "public railway steam", "birds": "no"}


@pytest.fixture
def writes(monkeypatch):
    """Let every model write the questions above; a number where the text is another."""
    asked = []

    def generate(_self, prompts, _most, **_settings):
        asked.extend(prompts)
        texts = [str(prompt) for prompt in prompts]
        names = [next(name for name, note in NOTES.items() if note in text) for text in texts]
        return [Generation(QUESTIONS_BY_HAND.get(name, "what is this about"), [], 0.0, True) for name in names]

    monkeypatch.setattr(gerund.LanguageModel, "generate", generate)
    return asked


def rank_by_hand(index, source, question, weight):
    sources = [hit.source for hit in index.search(question, 100, weight=weight)]
    return 1 / (sources.index(source) + 1)


def test_the_weight_that_finds_most_is_chosen_and_used(bundled, writes):
    index = notes_index(bundled)
    choice = index.choose_weight(len(NOTES))
    assert len(writes) == len(NOTES)
    assert ("bread", "How is bread made?") in choice.questions
    assert "birds" not in dict(choice.questions)  # one word is no question
    for weight, mean in choice.ranks.items():
        ranks = [rank_by_hand(index, source, question, weight) for source, question in choice.questions]
        assert mean == pytest.approx(sum(ranks) / len(ranks))
    best = max(choice.ranks.values())
    assert choice.weight == min(weight for weight, mean in choice.ranks.items() if mean == pytest.approx(best))
    assert index.about.weight == choice.weight
    assert index.search("steam", 2) == index.search("steam", 2, weight=choice.weight)
    assert index.search("steam", 2, weight=1) != index.search("steam", 2, weight=0)


def test_words_of_a_script_without_spaces_are_counted(bundled, monkeypatch):
    written = ["面包是用什么做的?", "什么?"]
    generations = [Generation(text, [], 0.0, True) for text in written]
    monkeypatch.setattr(gerund.LanguageModel, "generate", lambda *_, **__: generations)
    assert list(_questions(bundled, ["a", "b"])) == [written[0], ""]


def test_what_it_says():
    choice = WeightChoice(0.3, {0.0: 0.5, 0.3: 0.625, 1.0: 0.25}, [("a", "Why?")], "smollm2")
    assert str(choice) == (
        "weight 0.3 of the vectors, chosen on 1 questions that smollm2 wrote to the documents: reciprocal rank 0.625 "
        "(words alone 0.500, vectors alone 0.250)"
    )


def test_a_folder_keeps_it_until_vectors_are_made_anew(bundled, tmp_path):
    pytest.importorskip("lancedb")
    index = gerund.open_index(tmp_path / "my.index", bundled)
    index.add_documents([Document(name, text) for name, text in NOTES.items()])
    index.store.set_weight(0.25)
    again = gerund.open_index(tmp_path / "my.index", bundled)
    assert again.about.weight == 0.25
    assert again.search("steam", 2) == again.search("steam", 2, weight=0.25)
    again.add_documents([Document("more", "Something else.")])
    assert gerund.open_index(tmp_path / "my.index", bundled).about.weight == 0.25
    again.migrate(chunking=gerund.Chunking(tokens=30))
    assert gerund.open_index(tmp_path / "my.index", bundled).about.weight is None


def test_mistakes(bundled, monkeypatch):
    empty = gerund.open_index(None, bundled)
    with pytest.raises(DataError, match="there is no index yet"):
        empty.choose_weight()
    empty.add_documents([Document("one", "A single document.")])
    with pytest.raises(DataError, match="has 1 documents; a weight is chosen among two or more"):
        empty.choose_weight(QUESTIONS)
    with pytest.raises(ConfigError, match="questions=0 is not a number from 1"):
        empty.choose_weight(0)
    monkeypatch.setattr(gerund.LanguageModel, "generate", lambda *_, **__: [Generation("no", [], 0.0, True)] * 4)
    with pytest.raises(DataError, match="wrote no question to the"):
        notes_index(bundled).choose_weight(4)


def test_on_the_command_line(tmp_path, monkeypatch, writes):
    pytest.importorskip("lancedb")
    monkeypatch.chdir(tmp_path)
    write_notes(tmp_path / "notes")
    assert run_cli("index", "notes", "-o", "my.index").code == 0
    ran = run_cli("index", "-o", "my.index", "--choose-weight", 3)
    assert (ran.code, len(writes)) == (0, 3)
    assert "chosen on" in ran.err
    assert gerund.open_index("my.index").about.weight is not None
    ran = run_cli("index", "notes", "-o", "my.index", "--choose-weight", -1)
    assert "--choose-weight takes a number" in ran.mistake
