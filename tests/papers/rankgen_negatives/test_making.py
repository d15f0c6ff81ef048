"""Passages and their negatives: what they are, that workers make the same, and what cannot be made."""

import json
from unittest.mock import patch

import pytest

import gerund
from gerund.data.passages import cut_to_words
from gerund.errors import ConfigError, DataError
from gerund.inference.generate.generation import fit_prefix
from gerund.jobs import engine
from gerund.papers import rankgen_negatives as negative_passages
from gerund.scoring.word_overlap import OverlapScorer
from tests.cli.helpers import run_cli
from tests.jobs.pickled import PickledEngine
from tests.papers.rankgen_negatives.runs import SENTENCES, bytes_of, demand_same_elsewhere, make, rows


class TestPassages:
    def test_are_whole_sentences_that_follow_each_other(self, books, tmp_path):
        made = make(books, tmp_path / "out")
        found = rows(tmp_path / "out")
        texts = [json.loads(line)["text"] for line in books.read_text().splitlines()]
        assert (made.documents, made.short, made.passages, made.generated) == (5, 1, len(found), 0)
        assert len(found) > 40
        for row in found:
            assert f"{row['prefix']} {row['continuation']}" in texts[row["document"]]
            assert row["prefix"].startswith("W")
            assert row["prefix"].endswith("in.")
            assert row["continuation"].startswith("W")
            assert 6 <= len(row["prefix"].split()) <= 12
            assert 3 <= len(row["continuation"].split()) <= 9
        assert len({len(row["continuation"].split()) for row in found}) > 3

    def test_at_most_so_many_of_a_document(self, books, tmp_path):
        assert make(books, tmp_path / "out", per_document=3).passages == 12

    def test_seed_decides(self, books, tmp_path):
        for name, seed in (("a", 1), ("b", 1), ("c", 2)):
            make(books, tmp_path / name, per_document=3, seed=seed)
        assert rows(tmp_path / "a") == rows(tmp_path / "b") != rows(tmp_path / "c")

    def test_know_their_characters(self, books, tmp_path):
        make(books, tmp_path / "out", hard=2, scorer=OverlapScorer())
        documents = [json.loads(line)["text"] for line in books.read_text().splitlines()]
        for row in rows(tmp_path / "out"):
            text, (start, middle, end) = documents[row["document"]], row["span"]
            assert text[start : middle - 1] == row["prefix"]
            assert text[middle:end] == row["continuation"]
            assert [text[first:last] for first, last in row["hard_spans"]] == row["hard"]
            assert all(last <= start or end <= first for first, last in row["hard_spans"])

    def test_of_one_half_of_the_documents(self, books, tmp_path):
        for name in ("1/1", "1/2", "2/2"):
            make(books, tmp_path / name.replace("/", "-"), part=name)
        whole, first, second = (rows(tmp_path / name) for name in ("1-1", "1-2", "2-2"))
        assert {row["document"] for row in first} == {0, 2}
        assert {row["document"] for row in second} == {1, 3}
        assert sorted([*first, *second], key=lambda row: row["document"]) == whole
        with pytest.raises(ConfigError, match="part '3/2' is not written such as 1/2"):
            make(books, tmp_path / "other", part="3/2")


class TestNegatives:
    def test_generated_ones_keep_to_the_lengths_of_true_ones(self, books, tmp_path, monkeypatch):
        """Section 2.2: both are of 10 to 128 words, or length alone would tell them apart."""
        written = [
            "On and on it goes without an end at all so far",
            "No.",
            "It ends. " * 9,
            "It goes on and on here. It",
        ]
        monkeypatch.setattr(
            negative_passages,
            "continuations_of_length",
            lambda *given, **_: [written[i % 4] for i in range(len(given[2]))],
        )
        lm = gerund.load(adapter="none", attention="causal")
        made = make(books, tmp_path / "out", lm, generate=1.0)
        texts = [text for row in rows(tmp_path / "out") for text in row["generated"]]
        assert made.generated == len(texts) < made.passages
        assert {len(text.split()) for text in texts} <= set(range(3, 10))
        assert {text.split()[0] for text in texts} == {"On", "It"}

    @pytest.mark.slow
    def test_generated_ones_are_the_models(self, books, tmp_path, lm):
        made = make(books, tmp_path / "out", lm, generate=0.5, per_document=8)
        found = rows(tmp_path / "out")
        texts = [text for row in found for text in row.get("generated", [])]
        assert made.generated == len(texts)
        assert 4 < sum("generated" in row for row in found) < 28
        assert all(text.strip() == text and text for text in texts)

    def test_hard_ones_are_those_that_the_scorer_takes(self, books, tmp_path, lm):
        class Longest:
            name = "longest"

            def score(self, prefixes, continuations):
                return [[float(len(text)) for text in own] for own in continuations]

        make(books, tmp_path / "out", hard=2, scorer=Longest(), per_document=2)
        documents = [json.loads(line)["text"] for line in books.read_text().splitlines()]
        for row in rows(tmp_path / "out"):
            assert len(row["hard"]) == 2
            assert len(row["hard"][0]) >= len(row["hard"][1])
            for text in row["hard"]:
                assert text in documents[row["document"]]
                assert text not in row["prefix"]
                assert text != row["continuation"]


def test_long_prefixes_lose_their_start(lm):
    prefix = " ".join(SENTENCES[:10])
    kept = fit_prefix(lm.model, lm.tokenizer, prefix, 20)
    assert prefix.endswith(kept)
    assert 40 <= len(lm.tokenizer(kept)["input_ids"]) <= 44
    assert len(lm.generate(kept, 20)[0].token_ids) >= 1
    assert fit_prefix(lm.model, lm.tokenizer, "He left.", 20) == "He left."
    with pytest.raises(ConfigError, match="leave no prefix in a context of 64"):
        fit_prefix(lm.model, lm.tokenizer, prefix, 64)


def test_texts_are_cut_at_sentences():
    text = " One two three. Four five. Six"
    assert [cut_to_words(text, words) for words in (1, 3, 5, 50)] == [
        "One two three.", "One two three.", "One two three. Four five.", "One two three. Four five.",
    ]  # fmt: skip
    assert cut_to_words("  ", 3) == ""


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"generate": 0.5}, ConfigError, "generated continuations need a model"),
        ({"hard": 2}, ConfigError, "hard negatives need a scorer"),
        ({"generate": 1.5}, ConfigError, "no fraction between 0 and 1"),
        ({"per_document": 0}, ConfigError, "per_document=0 is below 1"),
        ({"fewest_words": 20}, ConfigError, "none are so long"),
        ({"prefix_words": 0}, ConfigError, "leaves no prefix"),
        ({"prefix_words": 4000}, DataError, "no document is long enough"),
    ],
)
def test_mistakes(books, tmp_path, changes, error, message):
    with pytest.raises(error, match=message):
        make(books, tmp_path / "out", **changes)


class TestElsewhere:
    """Workers make the very parts that this process makes."""

    @pytest.mark.slow
    def test_the_same_bytes(self, books, tmp_path, tiny_folder):
        demand_same_elsewhere(PickledEngine(2), books, tmp_path, tiny_folder)

    @pytest.mark.slow
    def test_on_the_command_line(self, books, tmp_path, tiny_folder):
        arguments = ["--prefix-words", 20, "--fewest-words", 3, "--most-words", 9, "--per-document", 3, "-m"]
        arguments += [tiny_folder, "--hard", 1, "--scorer", "overlap", "--json"]
        with patch.object(engine, "LocalEngine", PickledEngine):
            ran = run_cli("negatives", books, "-o", tmp_path / "spread", *arguments, "--workers", 2)
        assert ran.code == 0, ran.err
        alone = run_cli("negatives", books, "-o", tmp_path / "alone", *arguments)
        assert bytes_of(tmp_path / "spread") == bytes_of(tmp_path / "alone")
        assert json.loads(ran.out)["passages"] == json.loads(alone.out)["passages"] > 0


def test_documents_that_cannot_be_used_are_passed_over_and_listed(books, tmp_path):
    wanted = make(books, tmp_path / "wanted")
    lines = books.read_text().splitlines()
    books.write_text("\n".join([lines[0], "{", *lines[1:], '{"text": 3}']))
    made = make(books, tmp_path / "out")
    assert (made.documents, made.passages, made.errors) == (wanted.documents, wanted.passages, 2)
    assert rows(tmp_path / "out") == rows(tmp_path / "wanted")
    listed = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert [(one["file"], one["line"]) for one in listed] == [(str(books), 2), (str(books), len(lines) + 2)]
    assert listed[1]["reason"] == "'text' is not a text but int"
    ran = run_cli("negatives", books, "-o", tmp_path / "told", "--generate", 0, "--prefix-words", 12)
    assert f"gerund: warning: 2 documents not used: {tmp_path / 'told' / 'errors.jsonl'}\n" in ran.err


def test_no_document_that_can_be_used(tmp_path):
    books = tmp_path / "books.jsonl"
    books.write_text("{\n")
    with pytest.raises(DataError, match=rf"no document can be used; the first one is {books}, line 1: not valid JSON"):
        make(books, tmp_path / "out")
    assert not (tmp_path / "out").exists()
