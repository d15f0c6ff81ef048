"""Embedding a table into a file: what is in it, going on after any interruption, and what is refused."""

import errno
import json
import os
import pickle
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gerund.data.embedding import job as embedding
from gerund.data.embedding.files import read_embeddings
from gerund.data.embedding.job import EmbeddingConfig, Encoded, EncodingWorkers, _locked, embedding_job
from gerund.data.tables import open_table
from gerund.errors import (
    ConfigError,
    DataError,
    FingerprintError,
    InputError,
    ModelError,
    OutputExistsError,
    ResourceError,
    TextError,
)
from gerund.jobs.checkpoints import RowStore, WorkingFolder
from gerund.jobs.engine import prepare
from tests.data.embedding_crashes import ABOUT, fake_encode

TEXTS = [f"text {i}" for i in range(10)]


class Encoder:
    """Encodes by hashing, remembers what it was given, and fails where it is told to."""

    def __init__(self, fail_at=None, error=KeyboardInterrupt):
        self.shards = []
        self.fail_at = fail_at
        self.error = error

    def __call__(self, texts, kept=None):
        if len(self.shards) == self.fail_at:
            raise self.error
        self.shards.append(texts)
        return fake_encode(texts)


def embed(source, output, encode=fake_encode, about=ABOUT, computing=None, table=None, workers=None, **options):
    config = EmbeddingConfig(**{"shard_rows": 3, **options})
    with embedding_job(table or open_table(source), output, config) as job:
        return job.run(encode, about, computing=computing, workers=workers, show_progress=False)


def interrupted(source, output, after=2, **settings):
    with pytest.raises(KeyboardInterrupt):
        embed(source, output, Encoder(fail_at=after), **settings)
    assert working(output).is_dir()


def working(output):
    return output.with_name(f"{output.name}.parts")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(params=["parquet", "npy"])
def output(request, tmp_path):
    return tmp_path / "new" / f"out.{request.param}"


class TestOutput:
    def test_vectors_ids_and_what_made_them(self, source, output):
        summary = embed(source, output)
        assert (summary.rows, summary.resumed_rows, summary.truncated, summary.dimensions) == (10, 0, 4, 4)
        assert summary.files[-1] == output
        assert {path.name for path in output.parent.iterdir()} == {file.name for file in summary.files}
        found = read_embeddings(output, fingerprint="f")
        assert found.ids == list(range(10))
        assert found.vectors.dtype == np.float32
        np.testing.assert_array_equal(found.vectors, fake_encode(TEXTS).vectors)
        assert found.info == {"format": 1, **ABOUT, "rows": 10}
        with pytest.raises(FingerprintError, match="made by another encoder"):
            read_embeddings(output, fingerprint="g")

    def test_parquet_columns(self, source, tmp_path):
        embed(source, tmp_path / "a.parquet", keep_text=True)
        table = pq.read_table(tmp_path / "a.parquet")
        assert [str(field.type) for field in table.schema][:2] == ["int64", "string"]
        assert table.schema.names == ["id", "text", "embedding"]
        assert table.schema.field("embedding").type.list_size == 4
        assert table["text"].to_pylist() == TEXTS
        embed(source, tmp_path / "b.parquet")
        assert pq.read_schema(tmp_path / "b.parquet").names == ["id", "embedding"]

    def test_npy_companions(self, source, tmp_path):
        embed(source, tmp_path / "a.v1.npy", keep_text=True)
        lines = (tmp_path / "a.v1.ids.jsonl").read_text().splitlines()
        assert json.loads(lines[3]) == {"id": 3, "text": "text 3"}
        assert json.loads((tmp_path / "a.v1.meta.json").read_text())["fingerprint"] == "f"
        assert np.load(tmp_path / "a.v1.npy").shape == (10, 4)

    @pytest.mark.parametrize(
        "ids, expected", [([3, 1], [3, 1]), (["b", 1], ["b", "1"]), ([2**63, 1], [str(2**63), "1"])]
    )
    def test_ids_are_all_numbers_or_all_texts(self, output, tmp_path, ids, expected):
        source = tmp_path / "in.jsonl"
        source.write_text("".join(json.dumps({"id": id_, "text": "x"}) + "\n" for id_ in ids))
        embed(source, output)
        assert read_embeddings(output).ids == expected

    def test_many_parts_in_few_row_groups(self, tmp_path):
        source = tmp_path / "in.txt"
        source.write_text("x\n" * 500)
        embed(source, tmp_path / "a.parquet")
        assert pq.read_metadata(tmp_path / "a.parquet").num_row_groups == 1

    def test_empty_texts(self, output, tmp_path):
        source = tmp_path / "in.txt"
        source.write_text("one\n \n\ntwo\n")
        with pytest.raises(TextError, match=r"in\.txt, line 2: the text is empty; give --empty zeros"):
            embed(source, output)
        assert not working(output).exists()
        summary = embed(source, output, empty="skip")
        assert (summary.rows, summary.empty) == (2, 2)
        assert read_embeddings(output).ids == [0, 3]
        summary = embed(source, output, empty="zeros", force=True)
        assert (summary.rows, summary.empty) == (4, 2)

    def test_long_texts_make_small_parts(self, source, output):
        source.write_text("\n".join(["a" * 2**19] * 5))
        encoder = Encoder()
        embed(source, output, encoder, shard_rows=100)
        assert [len(shard) for shard in encoder.shards] == [2, 2, 1]

    def test_reading_what_is_no_output(self, source, tmp_path):
        with pytest.raises(DataError, match="no such file"):
            read_embeddings(tmp_path / "absent.npy")
        broken = tmp_path / "broken.parquet"
        broken.write_bytes(b"no parquet")
        with pytest.raises(DataError, match="not a file that 'gerund embed' wrote"):
            read_embeddings(broken)
        embed(source, tmp_path / "a.npy")
        (tmp_path / "a.ids.jsonl").write_text('{"id": 1}\n')
        with pytest.raises(DataError, match="1 ids for 10 vectors"):
            read_embeddings(tmp_path / "a.npy")


def test_a_folder_of_files(tmp_path):
    notes = tmp_path / "notes"
    notes.mkdir()
    for name in "ba":
        (notes / f"{name}.txt").write_text(f"text\n{name}")
    embed(notes, tmp_path / "out.parquet", table=open_table(notes, folders=True))
    found = read_embeddings(tmp_path / "out.parquet")
    assert found.ids == ["a.txt", "b.txt"]
    np.testing.assert_array_equal(found.vectors, fake_encode(["text\na", "text\nb"]).vectors)
    with pytest.raises(InputError, match=r"out\..* would lie in the folder that is read; choose a place outside of"):
        embed(notes, notes / "out.npy", table=open_table(notes, folders=True))


class TestBadRows:
    """With ``bad_rows="skip"`` no row ends the job; all that are left out are listed."""

    ROWS = ('{"id": "a", "text": "one"}', "{", '{"id": "c", "text": " "}', '{"id": "d", "text": "four"}')

    def source(self, tmp_path):
        rows = [*self.ROWS, '{"id": "e", "text": "not finite"}', '{"id": "f", "text": "too long"}']
        return self.written(tmp_path, [*rows, '{"id": "g", "text": "seven"}'])

    @staticmethod
    def written(tmp_path, rows):
        path = tmp_path / "in.jsonl"
        path.write_text("".join(row + "\n" for row in rows))
        return path

    @staticmethod
    def encode(texts, kept):
        vectors = fake_encode(texts).vectors
        for index, text in enumerate(texts):
            if text == "not finite":
                vectors[index, 1] = np.inf
        return Encoded(vectors, refused={i: "the text is too long" for i, text in enumerate(texts) if "long" in text})

    def test_are_left_out_and_listed(self, output, tmp_path):
        source = self.source(tmp_path)
        summary = embed(source, output, self.encode, bad_rows="skip", keep_text=True)
        found = read_embeddings(output)
        assert (found.ids, summary.rows, summary.bad) == (["a", "d", "g"], 3, 4)
        assert found.info["rows"] == 3
        np.testing.assert_array_equal(found.vectors, fake_encode(["one", "four", "seven"]).vectors)
        listed = [json.loads(line) for line in summary.errors_file.read_text().splitlines()]
        assert summary.errors_file == output.parent / "out.errors.jsonl"
        assert [(row["place"].removeprefix(f"{source}, "), row["id"]) for row in listed] == [
            ("line 2", None), ("line 3", "c"), ("line 5", "e"), ("line 6", "f")
        ]  # fmt: skip
        reasons = ["not valid JSON", "the text is empty", "the vector has values that are not finite", "too long"]
        for row, reason in zip(listed, reasons, strict=True):
            assert reason in row["reason"]
        assert [row.reason for row in summary.first_bad] == [row["reason"] for row in listed]

    def test_with_empty_rows_as_they_are_wanted(self, output, tmp_path):
        summary = embed(self.written(tmp_path, self.ROWS), output, bad_rows="skip", empty="zeros")
        assert (summary.rows, summary.bad, summary.empty) == (3, 1, 1)

    def test_after_an_interruption_they_are_the_same(self, output, tmp_path):
        source = self.source(tmp_path)
        embed(source, output, self.encode, bad_rows="skip", shard_rows=2)
        wanted = {path.name: path.read_bytes() for path in output.parent.iterdir()}
        for path in output.parent.iterdir():
            path.unlink()
        given = []

        def stopping(texts, kept):
            given.append(texts)
            if len(given) == 3:
                raise KeyboardInterrupt
            return self.encode(texts, kept)

        with pytest.raises(KeyboardInterrupt):
            embed(source, output, stopping, bad_rows="skip", shard_rows=2)
        assert embed(source, output, self.encode, bad_rows="skip", shard_rows=2).resumed_rows == 3
        assert {path.name: path.read_bytes() for path in output.parent.iterdir()} == wanted

    def test_an_old_list_is_not_taken_for_a_new_one(self, source, output):
        listed = output.parent / "out.errors.jsonl"
        output.parent.mkdir()
        listed.write_text("old\n")
        with pytest.raises(OutputExistsError, match=r"out.errors.jsonl exists already"):
            embed(source, output, bad_rows="skip")
        summary = embed(source, output, bad_rows="skip", force=True)
        assert (summary.bad, summary.errors_file, listed.exists()) == (0, None, False)

    def test_may_be_left_out_by_a_job_that_they_have_stopped(self, output, tmp_path):
        rows = ['{"text": "one"}', '{"text": "two"}', '{"text": "not finite"}', '{"text": "four"}']
        source = self.written(tmp_path, rows)
        with pytest.raises(ModelError, match="not finite"):
            embed(source, output, self.encode, shard_rows=2)
        assert embed(source, output, self.encode, shard_rows=2, bad_rows="skip").resumed_rows == 2
        assert read_embeddings(output).ids == [0, 1, 3]

    def test_that_were_left_out_stop_a_job_that_does_not_want_it(self, output, tmp_path):
        source = self.written(tmp_path, ['{"text": "one"}', '{"text": "not finite"}', '{"text": "three"}'])

        def stopping(texts, kept):
            if texts == ["three"]:
                raise KeyboardInterrupt
            return self.encode(texts, kept)

        with pytest.raises(KeyboardInterrupt):
            embed(source, output, stopping, shard_rows=2, bad_rows="skip")
        with pytest.raises(ModelError, match="not finite"):
            embed(source, output, self.encode, shard_rows=2)

    def test_texts_that_were_cut_are_refused_by_a_job_that_does_not_want_it(self, source, output):
        with pytest.raises(KeyboardInterrupt):
            embed(source, output, Encoder(fail_at=2))
        assert embed(source, output, overflow="error").resumed_rows == 0

    def test_a_table_with_no_other_rows(self, output, tmp_path):
        with pytest.raises(DataError, match=r"no row can be used; the first one is .*in.jsonl, line 1: not valid"):
            embed(self.written(tmp_path, ["{", "{}"]), output, bad_rows="skip")
        with pytest.raises(DataError, match=r"no row can be used; the first one is .*line 1: the text is too long"):
            embed(self.written(tmp_path, ['{"text": "too long"}']), output, self.encode, bad_rows="skip")
        assert not output.exists()
        assert not working(output).exists()


class Sending:
    """An engine whose worker gets what a process would: a copy of each shard."""

    workers = 2

    def __init__(self):
        self.bytes, self.refused = [], 0

    @contextmanager
    def pool(self, work, *, folder=None):
        function = prepare(work)

        class Pool:
            @staticmethod
            def map(shards):
                for shard in shards:
                    sent = pickle.dumps(shard)
                    self.bytes.append(len(sent))
                    facts = function(pickle.loads(sent))
                    self.refused += facts is None
                    yield shard, facts

        yield Pool


class TestWorkers:
    """A worker is told where the rows of its shard start, and reads them itself; where it cannot, they are sent."""

    @staticmethod
    def embed(source, output, engine, **options):
        elsewhere = EncodingWorkers(engine, lambda: TestBadRows.encode)
        return embed(source, output, TestBadRows.encode, workers=elsewhere, bad_rows="skip", **options)

    @pytest.fixture
    def source(self, tmp_path):
        rows = [json.dumps({"id": f"n{i}", "text": f"text {i} " + 500 * "x"}) for i in range(20)]
        return TestBadRows.written(
            tmp_path, ["{", *rows[:7], '{"text": " "}', '{"id": "e", "text": "too long"}', *rows[7:]]
        )

    def test_read_the_rows_themselves(self, source, output, tmp_path):
        engine = Sending()
        self.embed(source, output, engine, keep_text=True)
        assert (max(engine.bytes) < 1000, engine.refused) == (True, 0)
        alone = tmp_path / "alone" / output.name
        embed(source, alone, TestBadRows.encode, bad_rows="skip", keep_text=True)
        for path in alone.parent.iterdir():
            assert output.with_name(path.name).read_bytes() == path.read_bytes()

    def test_are_sent_them_where_they_see_others(self, source, output, monkeypatch):
        wanted = output.with_name(f"wanted{output.suffix}")
        embed(source, wanted, TestBadRows.encode, bad_rows="skip")
        monkeypatch.setattr(embedding.Source, "read", lambda self, start, digest: None)
        engine = Sending()
        self.embed(source, output, engine)
        assert engine.refused == 1
        assert max(engine.bytes) > 1500
        assert output.read_bytes() == wanted.read_bytes()

    def test_notice_another_file(self, source, tmp_path):
        table = open_table(source)
        found = embedding.Source(table, 3, "error", "skip")
        [first, second, *_] = found.shards()
        for shard in (first, second):
            assert found.read(shard.start, embedding.digest_of(shard)) == shard
        source.write_text(source.read_text().replace("text 4", "text 5"))
        assert found.read(first.start, embedding.digest_of(first)) == first
        assert found.read(second.start, embedding.digest_of(second)) is None
        source.unlink()
        assert found.read(first.start, embedding.digest_of(first)) is None


class TestGoingOn:
    def test_only_what_is_missing_is_encoded_and_the_bytes_are_the_same(self, source, output):
        embed(source, output)
        whole = {path.name: path.read_bytes() for path in output.parent.iterdir()}
        for path in output.parent.iterdir():
            path.unlink()
        interrupted(source, output)
        encoder = Encoder()
        summary = embed(source, output, encoder)
        assert encoder.shards == [TEXTS[6:9], TEXTS[9:]]
        assert (summary.rows, summary.resumed_rows, summary.truncated) == (10, 6, 4)
        assert {path.name: path.read_bytes() for path in output.parent.iterdir()} == whole

    def test_an_output_there_does_not_stop_a_forced_run_from_going_on(self, source, output):
        embed(source, output)
        interrupted(source, output, force=True)
        with pytest.raises(OutputExistsError):
            embed(source, output)
        encoder = Encoder()
        embed(source, output, encoder, force=True)
        assert len(encoder.shards) == 2

    def test_a_broken_part_is_made_again(self, source, output):
        interrupted(source, output)
        parts = sorted(working(output).glob("part-*"))
        parts[1].write_bytes(parts[1].read_bytes()[:-9])
        encoder = Encoder()
        embed(source, output, encoder)
        assert encoder.shards[0] == TEXTS[3:6]
        np.testing.assert_array_equal(read_embeddings(output).vectors, fake_encode(TEXTS).vectors)

    def test_the_input_may_move_but_not_change(self, source, output, tmp_path):
        interrupted(source, output)
        moved = source.rename(tmp_path / "moved.txt")
        lines = moved.read_text()
        moved.write_text(lines.replace("text 9", "text x"))
        with pytest.raises(InputError, match=r"the rows of .*in.txt have changed; .*--force to start from scratch"):
            embed(moved, output)
        moved.write_text(lines)
        assert embed(moved, output).resumed_rows == 6

    # Longer than what is read ahead.
    LONG = tuple(f"{'x' * 20_000} {text}" for text in TEXTS)

    def test_an_input_that_changes_on_the_way_is_not_mixed(self, source, output):
        source.write_text("".join(f"{text}\n" for text in self.LONG))

        class Editor(Encoder):
            def __call__(self, texts, kept=None):
                if not self.shards:
                    with source.open("r+b") as file:  # in place: nobody sees a file that is cut short
                        file.seek(-2, 2)
                        file.write(b"y")
                return super().__call__(texts, kept)

        encoder = Editor()
        with pytest.raises(DataError, match=r"in.txt has changed since this command began to read it.*--force"):
            embed(source, output, encoder)
        assert [len(shard) for shard in encoder.shards] == [3, 3, 3]
        assert not output.exists()
        with pytest.raises(InputError, match="have changed; go on as before, or give --force"):
            embed(source, output)
        source.write_text(source.read_text().replace("text y", "text 9"))
        assert embed(source, output).resumed_rows == 9
        np.testing.assert_array_equal(read_embeddings(output).vectors, fake_encode(self.LONG).vectors)

    def test_work_of_another_version_is_refused(self, source, output):
        interrupted(source, output)
        (working(output) / "manifest.json").write_text('{"settings": {}, "input": {"digest": "x"}, "name": "in.txt"}')
        with pytest.raises(InputError, match="unfinished work of another version of gerund; give --force"):
            embed(source, output)
        assert embed(source, output, force=True).resumed_rows == 0

    @pytest.mark.parametrize(
        "change, error, message",
        [
            (dict(about={**ABOUT, "fingerprint": "g", "model": "n"}), FingerprintError, "the model was m and is n"),
            (
                dict(about={**ABOUT, "fingerprint": "g", "attention": {"name": "bidir"}}),
                FingerprintError,
                "attention.name was None and is 'bidir'",
            ),
            (dict(about={**ABOUT, "prompt": "Q: "}), InputError, "prompt was None and is 'Q: '"),
            (dict(computing={"dtype": "bfloat16"}), InputError, "dtype was None and is 'bfloat16'"),
            (dict(shard_rows=4), InputError, "shard_rows was 3 and is 4"),
            (dict(keep_text=True), InputError, "keep_text was False and is True"),
        ],
    )
    def test_other_settings_are_refused(self, source, output, change, error, message):
        interrupted(source, output)
        with pytest.raises(error) as caught:
            embed(source, output, **change)
        assert type(caught.value) is error
        assert message in str(caught.value)
        assert len(list(working(output).glob("part-*"))) == 2
        assert embed(source, output, force=True, **change).resumed_rows == 0

    def test_a_model_that_has_only_moved_goes_on(self, source, output):
        interrupted(source, output)
        assert embed(source, output, about={**ABOUT, "model": "elsewhere/m"}).resumed_rows == 6

    def test_a_job_that_was_only_not_tidied_up_encodes_nothing(self, source, output, monkeypatch):
        def killed(folder):
            for path in list(folder.parts().values())[1:]:
                path.unlink()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(WorkingFolder, "remove", killed)
            with pytest.raises(KeyboardInterrupt):
                embed(source, output)
        assert output.exists()
        encoder = Encoder()
        summary = embed(source, output, encoder)
        assert encoder.shards == []
        assert (summary.rows, summary.resumed_rows, summary.truncated) == (10, 10, 4)
        assert not working(output).exists()

    def test_without_a_finished_part_nothing_stays(self, source, output):
        with pytest.raises(KeyboardInterrupt):
            embed(source, output, Encoder(fail_at=0))
        assert not working(output).exists()

    @pytest.mark.slow
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
    @pytest.mark.parametrize("kind", ["parquet", "npy"])
    def test_killed_before_every_step_on_the_disk(self, tmp_path, kind):
        root = Path(__file__).resolve().parents[2]
        ran = subprocess.run(
            [sys.executable, "-m", "tests.data.embedding_crashes", kind, str(tmp_path)],
            check=False,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root / "src")},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert int(ran.stdout) > 20


class TestStandardInput:
    def test_is_kept_until_the_end_and_compared_afterwards(self, source, output, monkeypatch):
        def piped(content, encode=fake_encode, **options):
            with content.open() as stream:
                monkeypatch.setattr(sys, "stdin", stream)
                return embed(None, output, encode, table=open_table("-"), **options)

        with pytest.raises(KeyboardInterrupt):
            piped(source, Encoder(fail_at=2))
        changed = source.with_name("changed.txt")
        changed.write_text("other\n")
        with pytest.raises(InputError, match="the rows of standard input have changed"):
            piped(changed)
        assert piped(source).resumed_rows == 6
        assert not working(output).exists()
        assert piped(changed, force=True).rows == 1

    def test_pipes_by_name(self, output, tmp_path):
        pipe = tmp_path / "pipe.jsonl"
        os.mkfifo(pipe)
        writer = subprocess.Popen(["sh", "-c", f'echo \'{{"text": "one"}}\' > {pipe}'])
        assert embed(pipe, output).rows == 1
        assert writer.wait() == 0


class TestFullDisk:
    @pytest.mark.parametrize("at", [5, 8, 11, 12, 14])
    def test_keeps_what_is_finished_and_goes_on(self, source, output, monkeypatch, at):
        calls = 0

        def full(handle):
            nonlocal calls
            calls += 1
            if calls >= at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(ResourceError, match=r"No space left on device; \d+ of 10 rows are kept in .*\.parts"):
                embed(source, output)
        assert not list(output.parent.rglob(".*")), "no half-written file may take up space"
        summary = embed(source, output)
        # Files and folders are flushed in turn: 1-3 for the manifest, 4 and 5 for the first part, ...
        assert summary.resumed_rows == min(10, 3 * ((at - 3) // 2))
        np.testing.assert_array_equal(read_embeddings(output).vectors, fake_encode(TEXTS).vectors)

    def test_rows_that_wait_for_the_disk_are_not_said_to_be_kept(self, source, output, monkeypatch):
        def full(*_arguments):
            raise ResourceError("cannot store vectors: No space left on device")

        is_full = True

        def encode(texts, kept):
            vectors = fake_encode(texts).vectors
            encoding_pass = kept.encoding_pass()
            done = encoding_pass.restore(vectors)
            for row in range(len(texts)):
                if row not in done:
                    encoding_pass.save([row], vectors[[row]])
                    if is_full and row == 0:
                        kept.flush()  # the first row is on the disk, the others wait for it
                        monkeypatch.setattr(RowStore, "add", full)
            return Encoded(vectors)

        with pytest.raises(ResourceError, match=r"No space left on device; 1 of 10 rows are kept in "):
            embed(source, output, encode)
        monkeypatch.undo()
        is_full = False
        assert embed(source, output, encode).resumed_rows == 1

    def test_at_the_very_first_write(self, source, output, monkeypatch):
        def full(handle):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ResourceError, match=r"No space left on device$"):
            embed(source, output)
        assert not working(output).exists()

    def test_out_of_memory_says_how_to_go_on(self, source, output):
        with pytest.raises(ResourceError, match=r"out of memory; 6 of 10 rows are kept in .* run the same command"):
            embed(source, output, Encoder(fail_at=2, error=ResourceError("out of memory")))


def test_rows_are_kept_by_one_worker_at_a_time(tmp_path):
    """Another one may live on at a shard that was begun again."""
    folder = tmp_path / "unfinished-000000"
    with _locked(folder) as own, _locked(folder) as another:
        assert (own, another) == (folder, None)
    with _locked(folder) as own:
        assert own == folder


def test_rows_that_were_too_long_come_in_where_they_may_be_cut(tmp_path):
    source, output = tmp_path / "in.txt", tmp_path / "out.parquet"
    source.write_text("".join(f"{text}\n" for text in TEXTS))

    class Refusing(Encoder):
        def __call__(self, texts, kept=None):
            vectors = super().__call__(texts, kept)
            return Encoded(getattr(vectors, "vectors", vectors), refused={1: "the text is too long"})

    with pytest.raises(KeyboardInterrupt):
        embed(source, output, Refusing(fail_at=2), bad_rows="skip", overflow="error")
    found = embed(source, output, bad_rows="skip", overflow="truncate")
    assert (found.rows, found.bad, found.resumed_rows) == (len(TEXTS), 0, 0)


class TestRefusals:
    def test_an_output_that_is_there(self, source, output):
        embed(source, output)
        before = output.read_bytes()
        with pytest.raises(OutputExistsError, match="give --force to replace it"):
            embed(source, output)
        assert output.read_bytes() == before
        assert not working(output).exists()
        embed(source, output, force=True)
        assert output.read_bytes() == before

    def test_one_that_comes_up_meanwhile(self, source, output):
        with embedding_job(open_table(source), output, EmbeddingConfig()) as job:
            output.write_bytes(b"someone else's")
            with pytest.raises(OutputExistsError):
                job.run(fake_encode, ABOUT, show_progress=False)
        assert output.read_bytes() == b"someone else's"
        output.unlink()
        assert embed(source, output, shard_rows=4096).resumed_rows == 10

    def test_the_input_itself(self, source, tmp_path):
        link = tmp_path / "link.parquet"
        link.symlink_to(source)
        with pytest.raises(InputError, match="is the input itself"):
            embed(source, link, force=True)

    @pytest.mark.parametrize("there", [True, False])
    def test_a_symbolic_link(self, source, output, tmp_path, there):
        output.parent.mkdir()
        real = tmp_path / f"real{output.suffix}"
        if there:
            real.write_text("precious")
        output.symlink_to(real)
        with pytest.raises(InputError, match=r"is a symbolic link to .*; name the file itself as the output"):
            embed(source, output, force=True)
        assert output.is_symlink()
        assert real.exists() is there
        assert not there or real.read_text() == "precious"
        output.unlink()
        (tmp_path / "elsewhere").mkdir()
        working(output).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InputError, match=r"\.parts is a symbolic link"):
            embed(source, output)
        assert not list((tmp_path / "elsewhere").iterdir())

    def test_a_folder(self, source, output):
        output.mkdir(parents=True)
        with pytest.raises(InputError, match="is a folder"):
            embed(source, output, force=True)

    def test_another_ending(self, source, tmp_path):
        with pytest.raises(ConfigError, match=r"must end in .parquet or .npy"):
            embed(source, tmp_path / "out.csv")

    def test_a_place_that_cannot_be_written(self, source, tmp_path):
        with pytest.raises(ResourceError, match="cannot write"):
            embed(source, source / "out.npy")

    def test_two_processes_at_once(self, source, output):
        with (
            embedding_job(open_table(source), output, EmbeddingConfig()),
            pytest.raises(InputError, match=rf"process {os.getpid()} is writing .* already"),
        ):
            embed(source, output)
        embed(source, output)

    def test_no_rows(self, output, tmp_path):
        source = tmp_path / "in.txt"
        source.write_text("")
        with pytest.raises(DataError, match=r"in.txt has no rows$"):
            embed(source, output)
        source.write_text("\n\n")
        with pytest.raises(DataError, match="has no rows with a text"):
            embed(source, output, empty="skip")

    def test_a_malformed_row_shows_before_anything_is_encoded(self, source, output):
        source.write_bytes(source.read_bytes() + b"\xff\n")
        encoder = Encoder()
        with pytest.raises(DataError, match="line 11: not valid UTF-8"):
            embed(source, output, encoder)
        assert encoder.shards == []

    def test_an_error_about_a_text_names_its_line(self, source, output):
        with pytest.raises(TextError, match=r"in.txt, line 5: the text has 99 tokens"):
            embed(source, output, Encoder(fail_at=1, error=TextError.about("text", 1, "has 99 tokens")))
        assert embed(source, output).resumed_rows == 3

    def test_vectors_that_are_not_finite(self, source, output):
        def broken(texts, kept):
            vectors = fake_encode(texts).vectors
            vectors[1, 2] = np.nan
            return Encoded(vectors)

        with pytest.raises(ModelError, match=r"in.txt, line 2: the vector has values that are not finite"):
            embed(source, output, broken)

    @pytest.mark.parametrize(
        "settings, message",
        [
            (dict(empty="drop"), "valid are: error, zeros, skip"),
            (dict(bad_rows="drop"), "valid are: error, skip"),
            (dict(shard_rows=0), "shard_rows must be at least 1, got 0"),
        ],
    )
    def test_options(self, source, output, settings, message):
        with pytest.raises(ConfigError, match=message):
            embed(source, output, **settings)
