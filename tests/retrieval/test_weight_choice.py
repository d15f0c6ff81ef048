"""The weight of vectors, chosen on questions that the model writes: by hand, stored, and from the command line."""

import pytest

import gerund
from gerund import ConfigError, Document
from gerund.errors import DataError
from gerund.retrieval.questions import QUESTIONS, WeightChoice, _questions
from gerund.types import Generation
from tests.cli.helpers import run_cli
from tests.retrieval.helpers import NOTES, notes_index, write_notes

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
