"""Documents are held out by their text alone, and what is asked is taken out of them."""

import json

import pytest

from gerund.adaptation.config import MOST_SEARCHED, AdaptConfig
from gerund.adaptation.data import Split, query_and_rest, split_documents, without_beginning
from gerund.errors import ConfigError, DataError
from gerund.retrieval.documents import Document
from gerund.retrieval.formats import Section
from tests.adaptation.made_up import documents


def read(count=70, *, titles=True):
    rows = documents(count, titles=titles)
    return [Document(f"a.jsonl#{row['id']}", row["text"], row.get("title", ""), (), "a.jsonl") for row in rows]


def test_every_document_is_trained_on_or_put_aside():
    every = read(200)
    found = split_documents(every, AdaptConfig(held_out=0.25))
    aside, training = {one.source for one in found.held_out}, {one.source for one in found.training}
    assert len(aside) == 50
    assert not aside & training
    assert aside | training == {one.source for one in every}
    assert all(set(one.sources) <= aside and one.kind == "title" for one in found.queries)
    assert {one.source for one in found.corpus} == aside | training
    assert all(not one.title for one in found.corpus)


def test_what_is_put_aside_depends_on_texts_alone():
    every = read(100)
    first = {one.text for one in split_documents(every, AdaptConfig()).held_out}
    assert {one.text for one in split_documents(every[::-1], AdaptConfig()).held_out} == first
    more = {one.text for one in split_documents(read(120), AdaptConfig(held_out=0.3)).held_out}
    assert len(first - more) <= 6
    assert {one.text for one in split_documents(every, AdaptConfig(seed=1)).held_out} != first


def test_at_least_thirty_and_at_most_five_hundred():
    assert len(split_documents(read(60), AdaptConfig(held_out=0.01)).queries) == 30
    assert len(split_documents(read(1200), AdaptConfig(held_out=0.5)).queries) == 500


def test_first_sentences_are_taken_out_of_their_documents():
    for options, every in ((AdaptConfig(), read(titles=False)), (AdaptConfig(ask="sentences"), read())):
        found = split_documents(every, options)
        whole = {one.source: one.text for one in every}
        rest = {one.source: one.text for one in found.held_out}
        assert found.kinds == {"first sentence": 30}
        for query in found.queries:
            [source] = query.sources
            assert whole[source].startswith(query.text)
            assert query.text not in rest[source]
            assert whole[source].endswith(rest[source])


def test_a_heading_that_is_the_title_is_taken_out_and_sections_move_with_the_text():
    text = "# Bread\n\nFlour and water and salt and yeast, and a warm oven.\n\n## Yeast\n\nIt rises."
    at = text.index("## Yeast")
    document = Document("a.md", text, "Bread", (Section(0, ("Bread",)), Section(at, ("Bread", "Yeast"))))
    query, rest = query_and_rest(document, frozenset(), AdaptConfig())
    assert query.text == "Bread"
    assert "Bread" not in rest.text
    assert [rest.text[one.start :][:8] for one in rest.sections] == [rest.text[:8], "## Yeast"]
    assert without_beginning(document, 0) is document
    inner = without_beginning(document, at + 2)
    assert [one.path for one in inner.sections] == [("Bread", "Yeast")]


def test_a_title_that_many_documents_share_asks_for_none():
    every = [Document(one.source, one.text, "Untitled") for one in read()]
    assert split_documents(every, AdaptConfig()).kinds == {"first sentence": 30}


def test_documents_of_one_title_are_one_query():
    every = read(70)
    every = [Document(one.source, one.text, every[number // 2].title) for number, one in enumerate(every)]
    found = split_documents(every, AdaptConfig())
    assert all(len(one.sources) == 2 for one in found.queries)
    assert len({one.text for one in found.queries}) == len(found.queries)


def test_quotes_ask_for_no_phrase():
    document = Document("a", 'The "Old Man" sat by the sea. ' + "He looked at it for hours and hours and hours.")
    query, _ = query_and_rest(document, frozenset(), AdaptConfig())
    assert query.text == "The Old Man sat by the sea."


def test_a_sentence_without_spaces_has_words():
    text = "斯蒂芬森的铁路在一八二五年开通。" + 3 * "这座桥建于一八二五年，现在已经没有人走过它了。"
    query, _ = query_and_rest(Document("a", text), frozenset(), AdaptConfig(language="zh"))
    assert query.text == "斯蒂芬森的铁路在一八二五年开通。"


def test_what_stands_word_for_word_in_its_document_is_counted():
    found = split_documents(read(), AdaptConfig())
    assert found.verbatim == 30
    assert "30 of them word for word" in found.summary
    assert split_documents(read(), AdaptConfig(ask="sentences")).verbatim == 0


def test_of_many_documents_a_part_is_searched_with_all_that_answers():
    many = tuple(Document(f"d{number}", f"Text number {number}.") for number in range(MOST_SEARCHED + 500))
    found = split_documents(read(60), AdaptConfig())
    corpus = Split((*many, *found.training), found.held_out, found.queries).corpus
    assert len(corpus) == MOST_SEARCHED
    assert {source for one in found.queries for source in one.sources} <= {one.source for one in corpus}


def test_too_few_documents_are_told_how_many_are_needed():
    with pytest.raises(DataError, match=r"3 documents are too few to adapt to: 30 .* give 60 or more"):
        split_documents(read(3), AdaptConfig())
    short = [Document(f"d{number}", f"Number {number}.") for number in range(90)]
    with pytest.raises(DataError, match="only 0 of 90 documents have a title or a first sentence"):
        split_documents(short, AdaptConfig())


def questions(tmp_path, rows):
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return AdaptConfig(questions=path)


def test_questions_put_their_documents_aside(tmp_path):
    every = read()
    options = questions(tmp_path, [{"question": f"Where is {one.title}?", "source": one.source} for one in every[:35]])
    found = split_documents(every, options)
    assert {one.source for one in found.training} == {one.source for one in every[35:]}
    assert found.kinds == {"question": 35}
    assert found.held_out[0].text == every[0].text


def test_questions_name_documents_in_several_ways(tmp_path):
    every = [Document(f"notes/sub/{number}.txt", one.text) for number, one in enumerate(read())]
    names = ["notes/sub/0.txt", "sub/1.txt", "2.txt", "./notes/sub/3.txt"]
    rows = [{"question": f"What of {name}?", "source": name} for name in names]
    rows += [{"question": f"And {number}?", "source": [f"{number}.txt", "0.txt"]} for number in range(4, 35)]
    found = {one.text: one.sources for one in split_documents(every, questions(tmp_path, rows), ["notes"]).queries}
    assert [found[f"What of {name}?"] for name in names] == [(f"notes/sub/{number}.txt",) for number in range(4)]
    assert found["And 9?"] == ("notes/sub/9.txt", "notes/sub/0.txt")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "Who?", "source": "zzz.txt"}, "line 1: no document is called 'zzz.txt'; the first one is"),
        ({"question": "Who?"}, "line 1: no field 'source'; present are: question"),
        ({"question": " ", "source": "a.jsonl#d1"}, "line 1: 'question' is empty"),
        ({"question": '"', "source": "a.jsonl#d1"}, "line 1: 'question' is empty"),
        ({"question": 5, "source": "a.jsonl#d1"}, "line 1: 'question'"),
        (["Who?"], "line 1: expected a JSON object, found list"),
        ({"question": "Who?", "source": []}, "line 1: 'source' is empty"),
        ({"question": "Who?", "source": "a.jsonl#d1"}, "1 different questions are too few"),
    ],
)
def test_questions_that_cannot_be_used(tmp_path, row, message):
    with pytest.raises(DataError, match=message):
        split_documents(read(), questions(tmp_path, [row]))


def test_questions_of_nearly_all_documents_leave_nothing_to_train_on(tmp_path):
    every = read()
    rows = [{"question": f"Where is {one.title}?", "source": one.source} for one in every[:60]]
    with pytest.raises(DataError, match="10 documents are left to train on"):
        split_documents(every, questions(tmp_path, rows))
    with pytest.raises(DataError, match="no such file"):
        split_documents(every, AdaptConfig(questions=tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": 0}, "minutes=0 leaves no time"),
        ({"minutes": float("nan")}, "minutes=nan leaves no time"),
        ({"minutes": 3, "steps": 4}, "pass either minutes or steps"),
        ({"steps": 0}, "steps=0 trains nothing"),
        ({"held_out": 0.9}, "held_out=0.9 is not a fraction"),
        ({"seed": -1}, "seed=-1"),
        ({"language": "../en"}, "language is a code"),
        ({"ask": "title"}, "did you mean 'titles'"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(ConfigError, match=message):
        AdaptConfig(**options)
