"""An interrupted run ends as an uninterrupted one, and touches nothing that is not its own."""

import errno
import json
import os
import shutil

import pytest

import gerund
from gerund.errors import ConfigError, DataError, InputError, OutputExistsError, ResourceError
from gerund.jobs.files import lock_folder
from gerund.scoring.registry import find_scorer
from tests.cli.helpers import run_cli
from tests.papers.rankgen_negatives.runs import SENTENCES, make, rows


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
