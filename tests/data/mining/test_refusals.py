"""What is wrong with a corpus or a call: documents that are listed, refusals that leave nothing behind."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data.mining import MiningConfig, job, mine
from gerund.errors import ConfigError, DataError, InputError, OutputExistsError
from tests.data.mining.corpora import rows, run, write_jsonl


class TestBadDocuments:
    LINES = (
        b'{"title": "The stone bridge", "text": "The stone bridge is old. Nobody comes."}',
        b'{"text": "half',
        b'{"text": "\xff\xfe"}',
        b"",
        b'{"text": null}',
        b'{"text": "\\u0000\\u0001 \\u0007"}',
        b'{"text": "  "}',
        b'{"title": "no text"}',
        b"[1, 2]",
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"title": "The stone bridge", "text": "The stone bridge is new. One more."}',
    )

    def test_are_counted_and_listed(self, tmp_path, output):
        corpus = tmp_path / "c.jsonl"
        corpus.write_bytes(b"\n".join(self.LINES))
        mined = run(corpus, output, MiningConfig(part_size=100))
        assert (mined.documents, mined.pairs, mined.errors) == (2, 2, 9)
        listed = [json.loads(line) for line in (tmp_path / "pairs.errors.jsonl").read_text().splitlines()]
        assert mined.errors_file == tmp_path / "pairs.errors.jsonl"
        assert len(mined.first_errors) == 5
        assert [error["line"] for error in listed] == [2, 3, 5, 6, 7, 8, 9, 10, 11]
        assert {error["file"] for error in listed} == {str(corpus)}
        for error, reason in zip(
            listed,
            [
                "not valid JSON",
                "not valid UTF-8 at byte 10",
                "'text' is not a text but NoneType",
                "the text has nothing but control characters",
                "the text is empty",
                "no field 'text'; present are: title",
                "expected a JSON object, found list",
                "'text' holds a lone surrogate at character 0",
                "not valid JSON",
            ],
            strict=True,
        ):
            assert error["reason"].startswith(reason)
        # Documents are numbered with the bad ones.
        assert sorted((row["document"], row["line"]) for row in rows(output)) == [(0, 1), (10, 12)]

    def test_a_broken_file_does_not_stop_the_others(self, tmp_path, corpus, output):
        broken = tmp_path / "a.jsonl.gz"
        broken.write_bytes(gzip.compress(corpus.read_bytes())[:-200])
        (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
        pq.write_table(pa.table({"body": ["x"]}), tmp_path / "c.parquet")
        mined = run([broken, tmp_path / "b.parquet", tmp_path / "c.parquet", corpus], output)
        assert [error.reason.split(" (")[0] for error in mined.first_errors] == [
            "broken or truncated archive",
            "not a readable parquet file",
            "no column 'text'; present are: body",
        ]
        assert mined.documents >= 60

    def test_parquet_that_is_not_utf8(self, tmp_path, output):
        raw = pa.array([b"The stone bridge is old. Nobody.", b"\xff", None], pa.binary())
        table = pa.table({"text": pa.Array.from_buffers(pa.string(), 3, raw.buffers(), null_count=1)})
        table = table.append_column("title", pa.array(["The stone bridge"] * 3))
        pq.write_table(table, tmp_path / "c.parquet")
        mined = run(tmp_path / "c.parquet", output)
        assert (mined.pairs, [error.line for error in mined.first_errors]) == (1, [2, 3])

    def test_the_list_of_an_earlier_run_is_no_leftover(self, tmp_path, corpus, output):
        errors = tmp_path / "pairs.errors.jsonl"
        errors.write_text("{}\n")
        with pytest.raises(OutputExistsError, match=r"errors\.jsonl exists already"):
            run(corpus, output)
        assert run(corpus, output, force=True).errors_file is None
        assert not errors.exists()


class TestRefusals:
    @pytest.fixture
    def refused(self, tmp_path, output):
        def refuse(error, message, corpus, *, output=output, **more):
            before = sorted(tmp_path.rglob("*"))
            with pytest.raises(error, match=message):
                run(corpus, output, **more)
            assert sorted(tmp_path.rglob("*")) == before, "a refusal leaves nothing behind"

        return refuse

    def test_an_empty_corpus(self, refused, tmp_path):
        corpus = tmp_path / "c.jsonl"
        corpus.write_bytes(b"\n\n")
        refused(DataError, "^there is no document to mine$", corpus)
        corpus.write_bytes(b"{}\n{}\n")
        refused(
            DataError, r"mine; 2 documents could not be used, the first: .*c\.jsonl, line 1: no field 'text'", corpus
        )
        refused(DataError, "there is no file to mine", [])

    def test_a_corpus_without_pairs(self, refused, tmp_path):
        corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": "One sentence."}, {"text": "Two of them. Or not."}])
        refused(DataError, "^no two sentences of 2 documents are a pair by these settings$", corpus)

    def test_files(self, refused, tmp_path, corpus, output):
        refused(DataError, "absent.jsonl: no such file", tmp_path / "absent.jsonl")
        (tmp_path / "c.docx").write_bytes(b"x")
        refused(DataError, "c.docx: unknown file format; valid endings are", tmp_path / "c.docx")
        refused(ConfigError, "file that ends in .parquet or .jsonl", corpus, output=tmp_path / "pairs.csv")
        refused(InputError, "is a file of the corpus; choose another output", corpus, output=corpus, force=True)
        output.mkdir()
        refused(InputError, "is a folder; choose another output", corpus)

    def test_an_output_that_is_there(self, refused, corpus, output):
        output.write_bytes(b"mine")
        refused(OutputExistsError, "exists already; choose another name or give --force to replace it", corpus)
        assert run(corpus, output, force=True).pairs > 0

    @pytest.mark.parametrize("name", ["pairs.parquet", "pairs.errors.jsonl"])
    def test_a_symbolic_link(self, refused, corpus, output, name, tmp_path):
        (tmp_path / "real").write_text("precious")
        (tmp_path / name).symlink_to("real")
        refused(InputError, f"{name} is a symbolic link to real; name the file itself", corpus, force=True)
        assert (tmp_path / "real").read_text() == "precious"

    def test_one_that_comes_up_meanwhile(self, corpus, output, monkeypatch):
        own = job.gather

        def gather(*given, **more):
            output.write_bytes(b"someone else's")
            return own(*given, **more)

        monkeypatch.setattr(job, "gather", gather)
        with pytest.raises(OutputExistsError):
            run(corpus, output)
        assert output.read_bytes() == b"someone else's"

    def test_workers(self, corpus, output):
        with pytest.raises(ConfigError, match="got 0"):
            mine([corpus], output, workers=0)
