"""Passages with negatives: what they are, and that an interrupted run ends as an uninterrupted one."""

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

import gerund
from gerund.config import Sampling
from gerund.data.passages import cut_to_words
from gerund.errors import ConfigError, DataError, InputError, OutputExistsError, ResourceError
from gerund.inference.generate.like_length import fitting
from gerund.jobs import engines
from gerund.jobs.engine import LocalEngine
from gerund.jobs.locks import hold
from gerund.scoring.registry import find_scorer
from gerund.scoring.words import OverlapScorer
from gerund.training import negative_passages
from gerund.training.negatives import NegativesConfig, make_negatives
from tests.cli.helpers import no_loading, run_cli

SENTENCES = [" ".join([f"W{i}", *(["a"] * (1 + i % 5)), "in."]) for i in range(60)]
SMALL = {"prefix_words": 12, "fewest_words": 3, "most_words": 9}


@pytest.fixture(scope="module")
def lm(tiny_folder):
    return gerund.load(tiny_folder, attention="causal")


@pytest.fixture
def books(tmp_path):
    path = tmp_path / "books.jsonl"
    texts = [" ".join(SENTENCES[i : i + 20]) for i in (0, 10, 20, 30)] + ["Too short."]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


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
        with pytest.raises(ConfigError, match="part '3/2' is no part such as 1/2"):
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


class TestResume:
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

        with pytest.raises(DataError, match="have changed since the run began; give --force to begin anew"):
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
            hold(tmp_path / "out"),
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

    @pytest.mark.slow
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
    def test_killed_before_every_step_on_the_disk(self, tmp_path):
        root = Path(__file__).resolve().parents[2]
        ran = subprocess.run(
            [sys.executable, "-m", "tests.training.negatives_crashes", str(tmp_path)],
            check=False,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert int(ran.stdout) > 10


def test_long_prefixes_lose_their_start(lm):
    prefix = " ".join(SENTENCES[:10])
    kept = fitting(lm.model, lm.tokenizer, prefix, 20)
    assert prefix.endswith(kept)
    assert 40 <= len(lm.tokenizer(kept)["input_ids"]) <= 44
    assert len(lm.generate(kept, 20)[0].token_ids) >= 1
    assert fitting(lm.model, lm.tokenizer, "He left.", 20) == "He left."
    with pytest.raises(ConfigError, match="leave no prefix in a context of 64"):
        fitting(lm.model, lm.tokenizer, prefix, 64)


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


class TestCommandLine:
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
            (["--batch-size", 0], "batch_size=0"),
            (["--generate", 2], "no fraction"),
            (["--hard", 1, "--scorer", "pmy"], "unknown scorer 'pmy'"),
        ],
    )
    def test_mistakes(self, books, tmp_path, options, message):
        with no_loading():
            assert message in run_cli("negatives", books, "-o", tmp_path / "out", *options).mistake
        assert not (tmp_path / "out").exists()

    def test_missing_file(self, tmp_path):
        assert "absent: no such file or folder" in run_cli("negatives", "absent", "-o", tmp_path / "out").mistake


class TestElsewhere:
    """Workers make the very parts that this process makes."""

    def test_the_same_bytes(self, books, tmp_path, lm):
        settings = NegativesConfig(**{**SMALL, "generate": 0.5, "hard": 1, "per_document": 4, "part_documents": 2})
        make_negatives([books], tmp_path / "alone", settings, lm=lm, scorer=OverlapScorer())
        elsewhere = negative_passages.Elsewhere(LocalEngine(1), lambda: (lm, OverlapScorer()))
        made = make_negatives(
            [books], tmp_path / "spread", settings, lm=lm, scorer=OverlapScorer(), elsewhere=elsewhere
        )
        assert made.generated > 0
        assert bytes_of(tmp_path / "spread") == bytes_of(tmp_path / "alone")

    def test_on_the_command_line(self, books, tmp_path, tiny_folder):
        arguments = ["--prefix-words", 20, "--fewest-words", 3, "--most-words", 9, "--per-document", 3, "-m"]
        arguments += [tiny_folder, "--hard", 1, "--scorer", "overlap", "--json"]
        with patch.object(engines, "LocalEngine", _Single):
            ran = run_cli("negatives", books, "-o", tmp_path / "spread", *arguments, "--workers", 2)
        assert ran.code == 0, ran.err
        alone = run_cli("negatives", books, "-o", tmp_path / "alone", *arguments)
        assert bytes_of(tmp_path / "spread") == bytes_of(tmp_path / "alone")
        assert json.loads(ran.out)["passages"] == json.loads(alone.out)["passages"] > 0


class _Single(LocalEngine):
    """Says that it has two workers, of which this process is the only one."""

    @contextmanager
    def crew(self, work, **_):
        assert self.workers == 2
        pickle.loads(pickle.dumps(work))
        with LocalEngine(1).crew(work) as crew:
            yield crew


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}
