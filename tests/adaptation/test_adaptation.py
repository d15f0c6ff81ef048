"""Documents are held out by their text alone, pairs keep clear of them, recipes fit model and machine; verdicts."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import yaml

from gerund.adaptation.config import MOST_SEARCHED, PAIRS, AdaptConfig, Base, Machine, choose, settings_for, shape_of
from gerund.adaptation.data import (
    Pairs,
    Query,
    Split,
    held_out_texts,
    leak_finder,
    make_pairs,
    plain,
    query_and_rest,
    read_documents,
    split_documents,
    without_beginning,
)
from gerund.adaptation.evaluation import (
    MEASURES,
    Measured,
    advice,
    beside_words,
    compare,
    main_of,
    measure,
    scores_of,
    second_stage,
    second_stage_advice,
    verdict,
)
from gerund.adaptation.running import adapt
from gerund.errors import ConfigError, DataError
from gerund.retrieval.documents import Document
from gerund.retrieval.formats import Section
from gerund.training.recipe import bundled_recipes
from tests.adaptation.made_up import documents, write


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


BASE = Base("default", 8_000_000, 7, 256, 8192, True, 1024)
CPU = Machine("cpu", 8000)


def test_a_text_is_read_once_and_what_cannot_be_read_is_told(tmp_path):
    write(tmp_path / "a.jsonl", documents(5))
    (tmp_path / "b.txt").write_text(documents(1)[0]["text"] + "\n")
    (tmp_path / "c.txt").write_text("  ")
    (tmp_path / "d.bin").write_text("no text file")
    found = read_documents([tmp_path])
    assert found.documents[0].title == documents(1)[0]["title"]
    assert (len(found.documents), found.files, found.repeated, len(found.failed)) == (5, 3, 1, 1)
    assert found.summary == (
        "5 documents in 3 files; left out: 1 file that could not be read to its end, 1 with the same text as another"
    )


def test_a_name_that_is_no_utf8(tmp_path):
    (tmp_path / os.fsdecode(b"caf\xe9.txt")).write_text(documents(1)[0]["text"])
    assert len(read_documents([tmp_path]).digest) == 32


@pytest.mark.slow
def test_broken_documents_are_told_and_end_nothing(tmp_path):
    write(tmp_path / "a.jsonl", documents(5))
    for name in ("b.docx", "c.epub", "d.pdf", "e.parquet"):
        (tmp_path / name).write_bytes(b"PK broken")
    found = read_documents([tmp_path])
    assert (len(found.documents), len(found.failed)) == (5, 4)


def test_nothing_to_read_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match="no such file or folder"):
        read_documents([tmp_path / "none"])
    with pytest.raises(DataError, match="there is no file to read; files are read"):
        read_documents([tmp_path])
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(DataError, match=r"no file could be read: .*there is no text in it"):
        read_documents([tmp_path])
    with pytest.raises(ConfigError, match="lies in the texts' folder"):
        read_documents([tmp_path], tmp_path / "out")
    with pytest.raises(ConfigError, match="name the files"):
        read_documents([])
    with pytest.raises(ConfigError, match="output is not valid Unicode"):
        adapt(None, tmp_path, "caf\udce9")


def as_documents(rows):
    return [Document(row["id"], row["text"], row.get("title", "")) for row in rows]


@pytest.mark.slow
def test_no_text_of_what_is_put_aside_is_in_a_pair(tmp_path, bundled):
    every = as_documents(documents(90))
    found = split_documents(every, AdaptConfig())
    # A sentence that all documents have is in those that were held out, too.
    same = "The same sentence stands in each and every one of these documents."
    found = Split(
        tuple(Document(one.source, f"{one.text} {same}", one.title) for one in found.training),
        tuple(Document(one.source, f"{one.text} {same}", one.title) for one in found.held_out),
        found.queries,
    )
    pairs = make_pairs(found, tmp_path, AdaptConfig(), bundled, show=False)
    rows = [json.loads(line) for line in (tmp_path / PAIRS).read_text().splitlines()]
    assert pairs.count == len(rows) > 100
    assert min(pairs.sentences, pairs.titles, pairs.chunks) > 10
    forbidden = held_out_texts(found, "en")
    assert plain(same) in forbidden
    texts = {plain(row[side]) for row in rows for side in ("text_a", "text_b")}
    assert not texts & forbidden
    aside = " ".join(one.text for one in found.held_out)
    assert not [text for text in texts if text in plain(aside)]
    assert not (tmp_path / "mined-all.jsonl").exists()


NEARLY = "The lantern of the northern pier was lit by hand until 1931. It burned oil, and later gas. Nobody knows why."


@pytest.mark.parametrize(
    ("text", "leaks"),
    [
        ("the lantern of the  northern pier was lit by hand until 1931.", True),
        ("A town is told of here. The lantern of the northern pier was lit by hand until 1931. So it is said.", True),
        ("of the northern pier was lit by hand", True),
        (f"Before. {NEARLY} After.", True),
        ("The old pier", True),
        ("The old pier is a pier of wood.", False),
        ("A short one stands in many documents. Nobody knows why.", False),
        ("The lantern of the southern pier was lit by hand until 1912.", False),
    ],
)
def test_what_a_nearly_equal_document_shares_with_one_that_is_put_aside_is_not_trained_on(text, leaks):
    found = Split((), (Document("a", NEARLY, "The old pier"), Document("b", "Yes.", "")), ())
    assert leak_finder(found, "en")(text) is leaks


def test_a_sentence_that_many_documents_have_gives_none_away():
    rights = "All rights of this text are kept by the town."
    training = tuple(Document(str(n), f"Town {n} is here. {rights}", "") for n in range(6))
    aside = (Document("a", f"{NEARLY} {rights}", "The old pier"),)
    assert leak_finder(Split(training[:5], aside, ()), "en")(f"A pier was built. {rights}")
    assert not leak_finder(Split(training, aside, ()), "en")(f"A pier was built. {rights}")


@pytest.mark.slow
def test_chunks_of_a_near_copy_of_what_is_put_aside_make_no_pair(tmp_path, bundled):
    found = split_documents(as_documents(documents(90)), AdaptConfig())
    copies = tuple(
        Document(f"copy-{one.source}", f"{one.text} Nothing else is told in this copy of it.", f"Copy {number}")
        for number, one in enumerate(found.held_out)
    )
    pairs = make_pairs(
        Split((*found.training, *copies), found.held_out, found.queries), tmp_path, AdaptConfig(), bundled
    )
    rows = [json.loads(line) for line in (tmp_path / PAIRS).read_text().splitlines()]
    trained = plain(" ".join(row[side] for row in rows for side in ("text_a", "text_b")))
    assert pairs.left_out >= len(copies)
    assert not [one for one in found.held_out if plain(one.text) in trained]


def test_without_a_repeated_phrase_titles_and_chunks_are_left(tmp_path, bundled):
    rows = [
        {
            "id": f"{number}",
            "title": f"{number:b}",
            "text": f"Quux {math.sin(number):.9f} vex. Flob {math.cos(number):.9f} myn!",
        }
        for number in range(100, 210)
    ]
    found = split_documents(as_documents(rows), AdaptConfig())
    assert make_pairs(found, tmp_path, AdaptConfig(), bundled, show=False).sentences == 0
    few = Split(found.training[:10], found.held_out, found.queries)
    with pytest.raises(DataError, match="10 documents make 10 pairs, and 50 are needed"):
        make_pairs(few, tmp_path / "few", AdaptConfig(), bundled, show=False)


def test_ranking_is_scored_as_by_hand():
    assert scores_of(["x", "a", "y", "b"], ["a", "b"]) == pytest.approx(
        ((1 / math.log2(3) + 1 / math.log2(5)) / (1 + 1 / math.log2(3)), 1.0, 0.5)
    )
    assert scores_of([str(number) for number in range(20)], ["10"]) == (0, 0, 0)
    assert scores_of(["a"], ["a", "b"])[1] == 0.5


@pytest.mark.slow
def test_a_query_finds_its_document_by_words_and_vectors(bundled):
    every = tuple(as_documents(documents(12)))
    asked = Split(every[:10], every[10:], (Query(f"Where is the {every[10].title}", (every[10].source,), "question"),))
    found = measure(bundled, asked, show=False)
    assert found.mean("words") == 1.0
    assert set(found.values) == {"words", "vectors", "hybrid"}
    assert found.documents == 12
    assert Measured.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_larger_model_gets_less_at_a_time_and_smaller_steps():
    sizes = [shape_of(Base("m", count, 24, 2048, 32000, False, 4096), CPU) for count in (10**7, 4 * 10**8, 2 * 10**9)]
    for name in ("rank", "rate", "batch", "micro"):
        values = [one[name] for one in sizes]
        assert values == sorted(values, reverse=True)
    assert sizes[0]["batch"] % sizes[0]["micro"] == 0
    assert shape_of(BASE, Machine("cuda", 80_000))["batch"] > shape_of(BASE, CPU)["batch"]
    assert shape_of(BASE, Machine("cpu", 600))["micro"] < 64


def settings(tmp_path, base=BASE, **options):
    return settings_for(base, CPU, AdaptConfig(**options), tmp_path / "data", tmp_path / "run")


def test_an_adapter_is_trained_further_and_else_a_new_one(tmp_path):
    assert "lora" not in settings(tmp_path)["model"]
    fresh = Base("m", 10**9, 16, 2048, 32000, False, 4096)
    own = settings(tmp_path, fresh)["model"]
    assert own == {"base": "m", "gradient_checkpointing": False, "adapter": "none", "lora": {"rank": 16, "alpha": 32}}
    assert "encoder" not in settings(tmp_path)
    assert settings(tmp_path, Base("m", 10**7, 4, 32, 97, False, 64))["objectives"][0]["length"] == 64


# What trains no vectors for a search, and what trains a decoder beside an encoder.
SCORERS = {name for name in bundled_recipes() if name.startswith("rankgen-") and "generator" not in name}
SCORERS |= {"default-scorer", "smollm2-scorer"}
OF_A_T5 = {"t5-default-base", "gur-cl-default"}


@pytest.mark.parametrize("name", sorted({*bundled_recipes()} - SCORERS - OF_A_T5 - {"relevance", "reranker", "gen"}))
def test_every_recipe_for_encoders_is_led_to_the_users_own_data(tmp_path, name):
    own = settings(tmp_path, recipe=name)
    assert own["model"]["base"] == "default"
    assert "config" not in own["model"]
    for steps in (1, 7, own["steps"]):
        recipe = choose(
            own, AdaptConfig(recipe=name, steps=steps), 640, CPU, tmp_path / "r.yaml", measured=False
        ).recipe
        assert recipe.steps == steps
        assert any(one.takes_part(steps) for one in recipe.objectives)
    read = {value for value in values(recipe.model_dump()) if isinstance(value, Path)}
    # No file but these, and the folders of data and run.
    assert read <= {Path("pairs.jsonl"), Path("texts.jsonl"), tmp_path / "data", tmp_path / "run"}
    assert read & {Path("pairs.jsonl"), Path("texts.jsonl")}
    for one in recipe.objectives:
        assert "{" not in (getattr(one, "query_prompt", None) or "")
        assert getattr(one, "dimensions", None) is None
        assert not getattr(one, "hard_negatives", 0)


def values(data):
    """Yield everything in nested dicts and lists."""
    if isinstance(data, dict | list | tuple):
        for one in data.values() if isinstance(data, dict) else data:
            yield from values(one)
    else:
        yield data


REFUSED = {
    **dict.fromkeys(SCORERS, "trains a scorer of continuations, and adapting trains vectors"),
    **dict.fromkeys(OF_A_T5, "trains the decoder of a T5, and adapting is for decoder-only"),
    "relevance": "trains how documents are ranked",
    "gen": "leaves the model as it is and trains answer tokens behind it",
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_recipe_that_trains_no_vectors_is_refused_in_a_sentence(tmp_path, name):
    with pytest.raises(ConfigError, match=f"{name} {REFUSED[name]}"):
        settings(tmp_path, recipe=name)


def test_what_changes_on_the_way_changes_at_the_same_fraction_of_fewer_steps(tmp_path):
    own = settings(tmp_path, recipe="unimae-simcse-default")
    options = AdaptConfig(recipe="unimae-simcse-default", steps=30)
    recipe = choose(own, options, 640, CPU, tmp_path / "r.yaml", measured=False).recipe
    assert (recipe.schedule.warmup_steps, recipe.schedule.decay_steps) == (6, 10)
    assert [one.weight for one in recipe.objectives] == [((0, 1), (20, 0)), ((0, 0), (20, 1))]


def test_steps_that_are_given_are_not_timed(tmp_path):
    (tmp_path / "data").mkdir()
    found = choose(settings(tmp_path), AdaptConfig(steps=7), 640, CPU, tmp_path / "r.yaml", measured=False)
    assert (found.recipe.steps, found.seconds, found.bound, found.epochs) == (7, None, "steps", 0.7)
    assert found.recipe.schedule.warmup_steps == 1
    assert found.recipe.save_steps % found.recipe.log_steps == 0
    assert yaml.safe_load((tmp_path / "r.yaml").read_text())["steps"] == 7
    assert json.loads(found.to_json())["steps"] == 7


class Took:
    """What a dry run found."""

    seconds_per_step, memory_mib = 2.0, 500


@pytest.mark.parametrize(
    ("options", "pairs", "steps", "bound"),
    [
        ({"minutes": 3}, 10**6, 90, "minutes"),
        ({}, 10**6, 300, "minutes"),
        ({"minutes": 30}, 640, 100, "pairs"),
        ({"recipe": "unimae-default"}, 10**6, None, "recipe"),
    ],
)
def test_there_are_as_many_steps_as_there_is_time_for(tmp_path, monkeypatch, options, pairs, steps, bound):
    monkeypatch.setattr("gerund.training.estimate.estimate", lambda _: Took())
    found = choose(settings(tmp_path, **options), AdaptConfig(**options), pairs, CPU, tmp_path / "r.yaml")
    assert found.bound == bound
    assert steps in (found.recipe.steps, None)
    assert found.seconds == 2 * found.recipe.steps


def test_too_little_time_says_how_much_is_needed(tmp_path, monkeypatch):
    monkeypatch.setattr("gerund.training.estimate.estimate", lambda _: Took())
    with pytest.raises(
        ConfigError, match=r"0.1 minutes are enough for 3 steps, and 10 are the least: give minutes of 0.33"
    ):
        choose(settings(tmp_path), AdaptConfig(minutes=0.1), 500, CPU, tmp_path / "r.yaml")


def measured(vectors, hybrid):
    words = [0.5] * len(vectors)
    by = {"words": words, "vectors": vectors, "hybrid": hybrid}
    return Measured({mode: {name: tuple(own) for name in MEASURES} for mode, own in by.items()}, 10, 20, 0.3)


def judged(before, after):
    return compare(measured(before, before), measured(after, after))


FACTS = {"queries": 40, "verbatim": 0, "bound": "minutes", "minutes": 10}


@pytest.mark.parametrize(
    ("after", "outcome", "said"),
    [
        ([0.7] * 40, "helped", "It helped: .*better .*40.0 before, 70.0 after, .30.0 .*p < 0.001.*better too"),
        ([0.1] * 40, "hurt", "It did not help: .*found worse"),
        ([0.4] * 40, "no matter", "It did not help: .*as before"),
        ([0.1] * 19 + [0.75] * 21, "unknown", "It cannot be told"),
    ],
)
def test_the_verdict_is_one_plain_sentence(after, outcome, said):
    compared = judged([0.4] * 40, after)
    assert main_of(compared, "vectors").outcome == outcome
    assert re.search(said, verdict(compared))
    told = " ".join(advice(compared, FACTS))
    assert ("--minutes 20" in told) == (outcome != "helped")
    assert main_of(compared, "words").change is None


def test_queries_that_words_find_by_themselves_are_told():
    compared = judged([0.4] * 40, [0.7] * 40)
    assert advice(compared, FACTS) == []
    assert "--ask sentences" in advice(compared, FACTS | {"verbatim": 30})[0]


def test_pairs_are_counted():
    assert Pairs(1, 2, 3, 4).count == 6
    assert Pairs(0, 0, 3, 4, questions=5, written=9).count == 8
    assert "5 of a question and a chunk (9 questions were written)" in Pairs(0, 0, 3, 4, 5, 9).summary


@pytest.mark.parametrize(
    ("vectors", "hybrid", "said"),
    [
        ([0.7] * 40, [0.9] * 40, "BM25 .nDCG@10 50.0.*together are better .*40.0.* and vectors alone are better"),
        ([0.1] * 40, [0.5] * 40, "together may be as good .*0.0 .* and vectors alone are worse .-40.0"),
    ],
)
def test_it_is_told_whether_bm25_is_as_good(vectors, hybrid, said):
    assert re.search(said, beside_words(measured(vectors, hybrid)))


def reranked(model, lift):
    """What was measured, with a trained reranker and lift that find what the search does not, by 50 queries each."""
    values = {mode: dict.fromkeys(MEASURES, 50 * (0.5,)) for mode in ("words", "vectors", "hybrid")}
    values |= {f"rerank {by}": dict.fromkeys(MEASURES, 50 * (mean,)) for by, mean in (("model", model), ("lift", lift))}
    return Measured(values, 10, 10, 0.5, {"model": 0.25, "lift": 1.0})


def test_a_second_stage_is_compared_with_the_search_and_with_words():
    found = reranked(0.6, 0.4)
    model, lift = second_stage(found)
    assert "trained reranker (nDCG@10 60.0, 0.25 s per query) is better than the search alone (+10.0 [+10.0 to" in model
    assert "is worse than the search alone (-10.0" in lift
    assert "is worse than BM25 alone" in lift
    assert Measured.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert second_stage_advice(found) == ["Search with --rerank 20, which now takes the trained reranker."]
    assert "Use --rerank-by lift" in second_stage_advice(reranked(0.6, 0.7))[0]
    assert "not surely better than the search alone" in second_stage_advice(reranked(0.5, 0.7))[0]
    none = Measured({mode: by for mode, by in found.values.items() if mode[:6] != "rerank"}, 10, 10, 0.5)
    assert (second_stage(none), second_stage_advice(none)) == ([], [])
