"""Passages and their negatives: what they are, who makes them, going on after an interruption, and the command."""

import errno
import json
import os
import shutil
from dataclasses import dataclass
from unittest.mock import patch

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError, InputError, OutputExistsError, ResourceError
from gerund.inference.generate.generation import fit_prefix
from gerund.jobs import engine
from gerund.jobs.files import lock_folder
from gerund.papers import rankgen_negatives as negative_passages
from gerund.papers.rankgen_negatives import Hardest, NegativesConfig, make_negatives
from gerund.scoring.dual_encoder import VectorScorer
from gerund.scoring.registry import find_scorer
from gerund.scoring.word_overlap import OverlapScorer
from gerund.settings.sampling import Sampling
from tests.cli.helpers import no_loading, run_cli
from tests.jobs.pickled import PickledEngine

SENTENCES = [" ".join([f"W{i}", *(["a"] * (1 + i % 5)), "in."]) for i in range(60)]
SMALL = {"prefix_words": 12, "fewest_words": 3, "most_words": 9}


def rows(folder):
    return [
        json.loads(line)
        for path in sorted(folder.glob("part-*.jsonl"))
        for line in path.read_text().split("\n")
        if line
    ]


def make(books, folder, lm=None, **changes):
    settings = {**SMALL, "generate": 0.0, "part_documents": 2, **changes}
    more = {name: settings.pop(name) for name in ("resume", "scorer", "force", "text_column") if name in settings}
    return make_negatives([books], folder, NegativesConfig(**settings), lm=lm, **more)


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, attention="causal")


@pytest.fixture
def books(tmp_path):
    path = tmp_path / "books.jsonl"
    texts = [" ".join(SENTENCES[i : i + 20]) for i in (0, 10, 20, 30)] + ["Too short."]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generate": 0.5}, "generated continuations need a model"),
        ({"hard": 2}, "hard negatives need a scorer"),
        ({"generate": 1.5}, "no fraction between 0 and 1"),
        ({"per_document": 0}, "per_document=0 is below 1"),
        ({"fewest_words": 20}, "none are so long"),
        ({"prefix_words": 0}, "leaves no prefix"),
    ],
)
def test_mistakes(books, tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        make(books, tmp_path / "out", **changes)


@pytest.mark.slow
def test_workers_make_the_very_parts_that_this_process_makes(books, tmp_path, tiny_folder):
    arguments = ["--prefix-words", 20, "--fewest-words", 3, "--most-words", 9, "--per-document", 3, "-m"]
    arguments += [tiny_folder, "--hard", 1, "--scorer", "overlap", "--json"]
    with patch.object(engine, "LocalEngine", PickledEngine):
        ran = run_cli("negatives", books, "-o", tmp_path / "spread", *arguments, "--workers", 2)
    assert ran.code == 0, ran.err
    alone = run_cli("negatives", books, "-o", tmp_path / "alone", *arguments)
    assert bytes_of(tmp_path / "spread") == bytes_of(tmp_path / "alone")
    made, other = json.loads(ran.out), json.loads(alone.out)
    assert made["passages"] == other["passages"] > 0
    assert made["generated"] == other["generated"] > 0


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


@dataclass(frozen=True)
class Text:
    text: str


class Lengths:
    """Scores by length, which ties, and notes how many texts come at a time."""

    name = "lengths"

    def __init__(self):
        self.asked = []

    def score(self, prefixes, continuations):
        self.asked += map(len, continuations)
        return [[float(len(text)) for text in own] for own in continuations]


def vector_scorer(encoded):
    def encode(texts):
        encoded.extend(texts)
        return np.array([[len(text), text.count("a"), 1.0] for text in texts])

    return VectorScorer("vectors", lambda texts: np.array([[1.0, 3.0, 0.0] for _ in texts]), encode)


@pytest.fixture
def texts():
    rng = np.random.default_rng(0)
    return [Text("".join(rng.choice(list("ab"), int(rng.integers(1, 12))))) for _ in range(500)]


@pytest.mark.parametrize("count", [1, 10, 600])
@pytest.mark.parametrize("chunk", [1, 7, 256, 1000])
def test_are_the_best_of_all(texts, chunk, count):
    scorer = Lengths()
    found = Hardest(scorer, chunk=chunk).of("prefix", iter(texts), count)
    # Python's sort keeps the order of equals.
    assert [id(one) for one in found] == [id(one) for one in sorted(texts, key=lambda one: -len(one.text))[:count]]
    assert sum(scorer.asked) == 500
    assert max(scorer.asked) <= chunk


def test_nothing_to_choose_from():
    assert Hardest(Lengths()).of("prefix", iter([]), 3) == []


@pytest.mark.parametrize("room", [0, 12 * 40, 2**20])
def test_vectors_are_kept_within_their_room(texts, room):
    encoded = []
    scorer = vector_scorer(encoded)
    finder = Hardest(scorer, chunk=50, room=room)
    [scores] = vector_scorer([]).score(["prefix"], [[f" {one.text}" for one in texts]])
    order = sorted(range(len(texts)), key=lambda place: -scores[place])
    for _ in range(2):
        assert finder.of("prefix", texts, 10) == [texts[place] for place in order[:10]]
        assert len(finder._cache) * 12 <= room
    different = len({one.text for one in texts})
    if room == 2**20:
        assert len(encoded) == different  # the second time nothing is encoded anew
    else:
        assert len(encoded) > 1.5 * different


class TestResume:
    @pytest.mark.slow
    def test_ends_with_the_same_files(self, books, tmp_path, lm):
        whole, broken = tmp_path / "whole", tmp_path / "broken"
        settings = {"generate": 1.0, "per_document": 4}
        made = make(books, whole, lm, **settings)
        shutil.copytree(whole, broken)
        (broken / "part-00001.jsonl").unlink()
        assert make(books, broken, lm, **settings, resume=True) == made
        assert rows(broken) == rows(whole)

    def test_begins_where_nothing_is(self, books, tmp_path):
        assert make(books, tmp_path / "out", resume=True).passages

    def test_other_settings_are_refused_with_both_values(self, books, tmp_path):
        make(books, tmp_path / "out")
        with pytest.raises(ConfigError, match="was begun otherwise: seed was 0 and is 1"):
            make(books, tmp_path / "out", seed=1, resume=True)
        with pytest.raises(OutputExistsError, match="exists already; resume it"):
            make(books, tmp_path / "out")

    def test_another_column_is_refused(self, tmp_path):
        texts = [" ".join(SENTENCES[i : i + 20]) for i in (0, 10, 20)]
        books = tmp_path / "two.jsonl"
        books.write_text("".join(json.dumps({"text": text, "body": text.upper()}) + "\n" for text in texts))
        make(books, tmp_path / "out")
        (tmp_path / "out" / "part-00001.jsonl").unlink()
        with pytest.raises(ConfigError, match="text_column was 'text' and is 'body'; go on as before, or give --force"):
            make(books, tmp_path / "out", resume=True, text_column="body")
        assert make(books, tmp_path / "out", resume=True).passages == len(rows(tmp_path / "out"))

    def test_another_model_is_refused_where_only_the_scorer_uses_it(self, books, tmp_path, lm, tiny_folder):
        other = gerund.load(tiny_folder, attention="causal", pooling="last")
        make(books, tmp_path / "out", lm, hard=1, scorer=find_scorer("pmi", lm), per_document=1)
        with pytest.raises(ConfigError, match=r"the model was .* with other weights or settings"):
            make(books, tmp_path / "out", other, hard=1, scorer=find_scorer("pmi", other), per_document=1, resume=True)

    def test_texts_with_the_line_ends_of_unicode(self, tmp_path):
        ends = "\u2028\u2029\u0085\x0b\x0c\x1c"
        books = tmp_path / "odd.jsonl"
        texts = [" ".join(f"{sentence[:-3]}{ends} in." for sentence in SENTENCES[i : i + 20]) for i in (0, 20)]
        books.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        made = make(books, tmp_path / "out")
        whole = (tmp_path / "out" / "part-00000.jsonl").read_bytes()
        assert "\u2028".encode() in whole
        assert make(books, tmp_path / "out", resume=True) == made
        assert (tmp_path / "out" / "part-00000.jsonl").read_bytes() == whole

    def test_force_begins_anew_and_touches_no_other_file(self, books, tmp_path):
        make(books, tmp_path / "out")
        (tmp_path / "out" / "mine.txt").write_text("precious")
        made = make(books, tmp_path / "out", seed=1, per_document=1, force=True)
        assert made.passages == len(rows(tmp_path / "out"))
        assert (tmp_path / "out" / "mine.txt").read_text() == "precious"
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "part-00000.jsonl").write_text("precious")
        with pytest.raises(OutputExistsError, match="holds other files; choose another name"):
            make(books, tmp_path / "other", force=True)
        assert (tmp_path / "other" / "part-00000.jsonl").read_text() == "precious"

    def test_a_folder_of_another_version_is_refused(self, books, tmp_path):
        make(books, tmp_path / "out")
        (tmp_path / "out" / "negatives.json").write_text('{"seed": 0}')
        with pytest.raises(ConfigError, match=r"negatives.json is of another version of gerund; give --force"):
            make(books, tmp_path / "out", resume=True)

    def test_data_that_change_on_the_way_are_refused(self, books, tmp_path):
        class Editor:
            name = "editor"

            def score(self, prefixes, continuations):
                books.write_text(books.read_text().replace("in.", "at."))
                return [[0.0] * len(own) for own in continuations]

        with pytest.raises(DataError, match="have changed since the run began; give --force to start again"):
            make(books, tmp_path / "out", hard=1, scorer=Editor())
        assert not (tmp_path / "out").exists()

    def test_other_data_are_refused(self, books, tmp_path):
        make(books, tmp_path / "out")
        books.write_text(books.read_text() + '{"text": "More."}\n')
        with pytest.raises(ConfigError, match="was begun otherwise: the files of the corpus have changed"):
            make(books, tmp_path / "out", resume=True)


class TestInterruption:
    def stopped(self, books, folder, error):
        class Stop:
            name = "stop"
            calls = 0

            def score(self, prefixes, continuations):
                self.calls += 1
                if self.calls == 3:
                    raise error
                return [[float(len(text)) for text in own] for own in continuations]

        make(books, folder, hard=1, scorer=Stop(), per_document=1)

    def test_says_what_is_kept(self, books, tmp_path):
        with pytest.raises(KeyboardInterrupt) as caught:
            self.stopped(books, tmp_path / "out", KeyboardInterrupt)
        assert caught.value.__notes__ == [
            f"finished parts are kept in {tmp_path / 'out'}: give --resume to go on from there"
        ]
        with pytest.raises(ResourceError, match=r"^out of memory; finished parts are kept in .*: give --resume"):
            self.stopped(books, tmp_path / "new", ResourceError("out of memory"))

    def test_without_a_part_nothing_stays(self, books, tmp_path):
        with pytest.raises(DataError, match="no field 'body'"):
            make(books, tmp_path / "out", text_column="body")
        with pytest.raises(DataError, match="no document is long enough"):
            make(books, tmp_path / "out", prefix_words=4000)
        assert not (tmp_path / "out").exists()

    def test_two_at_once(self, books, tmp_path):
        with (
            lock_folder(tmp_path / "out"),
            pytest.raises(InputError, match=rf"process {os.getpid()} is writing .*out already"),
        ):
            make(books, tmp_path / "out")
        assert make(books, tmp_path / "out").passages

    def test_a_place_that_cannot_be_written(self, books, monkeypatch, tmp_path):
        with pytest.raises(ResourceError, match=r"cannot write .*out: Not a directory"):
            make(books, books / "out")

        def read_only(*_given, **_more):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(os, "mkdir", read_only)
        ran = run_cli("negatives", books, "-o", tmp_path / "out", "--generate", 0)
        assert ran.code == 1
        assert ran.err == f"gerund: error: cannot write {tmp_path / 'out'}: Permission denied\n"


class TestCommandLine:
    @pytest.mark.slow
    def test_makes_and_resumes(self, books, tmp_path, tiny_folder, lm):
        words = ["--prefix-words", 12, "--fewest-words", 3, "--most-words", 9, "--per-document", 3]
        ran = run_cli("negatives", books, "-o", tmp_path / "out", "-m", tiny_folder, "--generate", 1, *words, "--json")
        assert ran.code == 0
        made = json.loads(ran.out)
        assert (made["passages"], made["short"]) == (12, 1)
        settings = NegativesConfig(**SMALL, per_document=3, generate=1.0, sampling=Sampling(1.0, top_p=0.9))
        make_negatives([books], tmp_path / "other", settings, lm=lm)
        assert rows(tmp_path / "out") == rows(tmp_path / "other")
        ran = run_cli(
            "negatives", books, "-o", tmp_path / "out", "-m", tiny_folder, "--generate", 1, *words, "--resume"
        )
        assert ran.out.startswith("12 passages of 4 documents in ")
        assert "1 documents were too short" in ran.out
        again = ["negatives", books, "-o", tmp_path / "out", "-m", tiny_folder, "--generate", 1, *words]
        assert "out exists already; resume it, replace it with --force" in run_cli(*again).mistake
        assert run_cli(*again, "--force").out.startswith("12 passages of 4 documents in ")

    def test_hard(self, books, tmp_path, tiny_folder, lm):
        words = ["--prefix-words", 12, "--fewest-words", 3, "--most-words", 9, "--per-document", 2]
        options = ["--generate", 0, "--hard", 1, "--scorer", "overlap"]
        ran = run_cli("negatives", books.parent, "-o", tmp_path / "out" / "deep", "-m", tiny_folder, *options, *words)
        assert (ran.code, ran.err) == (0, "")
        settings = NegativesConfig(**SMALL, per_document=2, generate=0.0, hard=1)
        make_negatives([books], tmp_path / "other", settings, scorer=find_scorer("overlap", lm))
        assert rows(tmp_path / "out" / "deep") == rows(tmp_path / "other")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--hard", 3], "--hard and --scorer belong together"),
            (["--scorer", "pmi"], "--hard and --scorer belong together"),
            (["absent"], "absent: no such file or folder"),
            (["--batch-size", 0], "batch_size=0"),
            (["--generate", 2], "no fraction"),
            (["--hard", 1, "--scorer", "pmy"], "unknown scorer 'pmy'"),
        ],
    )
    def test_mistakes(self, books, tmp_path, options, message):
        with no_loading():
            assert message in run_cli("negatives", books, "-o", tmp_path / "out", *options).mistake
        assert not (tmp_path / "out").exists()
