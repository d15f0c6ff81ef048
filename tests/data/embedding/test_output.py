"""Embedding a table into a file: what is in it, and reading it back."""

import json
import pickle
from contextlib import contextmanager

import numpy as np
import pyarrow.parquet as pq
import pytest

from gerund.data.embedding import job as embedding
from gerund.data.embedding.files import read_embeddings
from gerund.data.embedding.job import Encoded, EncodingWorkers
from gerund.data.tables import open_table
from gerund.errors import DataError, FingerprintError, InputError, ModelError, OutputExistsError, TextError
from gerund.jobs.engine import prepare
from tests.data.embedding.crashes import ABOUT, fake_encode
from tests.data.embedding.jobs import TEXTS, Encoder, embed, working


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
