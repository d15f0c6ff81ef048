"""Embedding a table into a file: what is in it, and reading it back."""

import json

import numpy as np
import pyarrow.parquet as pq
import pytest

from gerund.data.embedding_files import read_embeddings
from gerund.data.tables import open_table
from gerund.errors import DataError, FingerprintError, InputError, TextError
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
