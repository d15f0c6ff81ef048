"""Rows that cannot be read are told of, and whoever begins in the middle of a table reads the same rows."""

import gzip
import lzma
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data.tables import BadRow
from gerund.errors import DataError
from tests.data.table_files import pairs, parquet, read, write


class TestBadRows:
    """Rows that cannot be read are told of, and those behind them are read."""

    @pytest.mark.parametrize(
        ("name", "content", "kept", "told"),
        [
            (
                "a.txt",
                b"one\n\xff\nthree\n",
                [(0, "one"), (2, "three")],
                [("line 2", "not valid UTF-8 at byte 0; convert it to UTF-8")],
            ),
            (
                "a.jsonl",
                b'{"text": "one"}\n{\n["x"]\n{"text": 4}\n{"txt": "b"}\n{"text": "\xff"}\n\n{"text": "seven"}\n',
                [(0, "one"), (6, "seven")],
                [
                    ("line 2", "not valid JSON"),
                    ("line 3", "expected a JSON object, found list"),
                    ("line 4", "'text' is not a text but int"),
                    ("line 5", "no column 'text'; present are: txt"),
                    ("line 6", "not valid UTF-8 at byte 10"),
                ],
            ),
            (
                "a.jsonl",
                '{\n{"text": "one", "id": "a"}\n{"text": "two"}\n{"text": "three", "id": null}\n',
                [("a", "one")],
                [("line 1", "not valid"), ("line 3", "no column 'id'"), ("line 4", "the id 'id' is neither")],
            ),
            (
                "a.csv",
                b'id,text\n1,"a\nb"\n2,a,b\n3,"x" y\n4,\xff\n5,"three\n\xff lines\n"\n6,end\n',
                [("1", "a\nb"), ("6", "end")],
                [
                    ("line 4", "malformed row (3 fields, and the header has 2)"),
                    ("line 5", "malformed row"),
                    ("line 6", "not valid UTF-8"),
                    ("line 8", "not valid UTF-8"),
                ],
            ),
            ("a.csv", 'text\none\n"open\nto the end', [(0, "one")], [("line 3", "malformed row (unexpected end")]),
            ("a.tsv", b"text\tn\none\t1\ntwo\n\xff\t2\nfour\t4\n", [(0, "one"), (3, "four")], 2 * [("line", "")]),
        ],
        ids=["txt", "jsonl", "ids", "csv", "open quote", "tsv"],
    )
    def test_are_told_by_line(self, tmp_path, name, content, kept, told):
        path, bad = write(tmp_path / name, content), []
        rows = [row for one in read(path, bad=bad.append) for row in zip(one.ids, one.texts, strict=True)]
        assert rows == kept
        assert len(bad) == len(told)
        for found, (place, reason) in zip(bad, told, strict=True):
            assert found.place.startswith(f"{path}, {place}")
            assert found.reason.startswith(reason)

    def test_of_parquet(self, tmp_path):
        broken = pa.array([b"ok", b"\xff", b"fine"]).view(pa.string())
        path, bad = parquet(tmp_path / "a.parquet", id=["a", "b", "c"], text=broken), []
        [rows] = read(path, bad=bad.append)
        assert (rows.ids, rows.texts) == (["a", "c"], ["ok", "fine"])
        assert bad == [BadRow(f"{path}, row 2", "not valid UTF-8 at byte 0; convert it to UTF-8", "b")]

    @pytest.mark.parametrize(
        ("content", "kept", "told"),
        [
            (b'id,text\n1,"caf\xe9 one\nline two, tail"\n2,good\n', ["good"], [2]),
            (b'id,text\n1,"one\n\xe9 two"\n2,good\n3,"a ""b"" \xe9"\n4,"c\nd"\n', ["good", "c\nd"], [3, 5]),
        ],
    )
    def test_bytes_that_are_no_text_leave_quotes_as_they_are(self, tmp_path, content, kept, told):
        path, bad = write(tmp_path / "a.csv", content), []
        [rows] = read(path, bad=bad.append)
        assert rows.texts == kept
        assert [one.place for one in bad] == [f"{path}, line {number}" for number in told]

    def test_a_quote_that_nobody_closes_says_how_far_it_goes(self, tmp_path):
        path, bad = write(tmp_path / "a.csv", 'id,text\n1,"one\n3,good\n4,"q"\n5,x\n'), []
        [rows] = read(path, bad=bad.append)
        assert rows.ids == ["5"]
        assert [one.reason for one in bad] == ["malformed row (',' expected after '\"'); it goes on to line 4"]

    def test_tell_ids_where_there_are_any(self, tmp_path):
        bad = []
        read(
            write(tmp_path / "a.jsonl", '{"id": "a", "text": 5}\n{"id": "b", "text": "x"}\n{"id": []}\n'),
            bad=bad.append,
        )
        read(write(tmp_path / "b.jsonl", '{"text": "x"}\n{"text": 5}\n'), bad=bad.append)
        read(write(tmp_path / "c.txt", b"x\n\xff\n"), bad=bad.append)
        assert [one.id for one in bad] == ["a", None, 1, 1]

    def test_what_is_wrong_with_the_file_as_a_whole_is_raised(self, tmp_path):
        for name, content in (("a.csv", "a,b\n1,2\n"), ("a.parquet", b"no"), ("a.txt.gz", b"no archive")):
            with pytest.raises(DataError):
                read(write(tmp_path / name, content), bad=pytest.fail)

    def test_a_broken_file_of_a_folder_stops_no_other(self, tmp_path):
        write(tmp_path / "a.txt", b"\xff")
        write(tmp_path / "b.csv", "body\nx\n")
        write(tmp_path / "c.txt.gz", b"no archive")
        write(tmp_path / "d.jsonl", '{"text": 1}\n{"text": "kept"}\n')
        bad = []
        [rows] = read(tmp_path, folders=True, bad=bad.append)
        assert rows.texts == ["kept"]
        assert [one.id for one in bad] == ["a.txt", None, "c.txt.gz", "d.jsonl#0"]
        assert bad[0].reason == "line 1: not valid UTF-8 at byte 0; convert it to UTF-8"
        places = [str(tmp_path / name) for name in ("a.txt", "b.csv", "c.txt.gz")]
        assert [one.place for one in bad] == [*places, f"{tmp_path / 'd.jsonl'}, line 1"]
        with pytest.raises(DataError, match="not valid UTF-8"):
            read(tmp_path, folders=True)

    def test_an_archive_that_is_cut_off_says_what_of_it_is_used(self, tmp_path):
        whole = lzma.compress(b"".join(b'{"text": "%d"}\n' % number for number in range(20_000)), preset=0)
        write(tmp_path / "a.jsonl.xz", whole[: len(whole) // 2])
        bad = []
        rows = sum(len(one) for one in read(tmp_path, folders=True, bad=bad.append))
        assert 0 < rows < 20_000
        assert bad[0].reason.endswith(f"; its first {rows} rows are used")

    @pytest.mark.skipif(sys.platform in ("win32", "darwin"), reason="names are Unicode there")
    def test_names_that_are_no_text_and_what_is_no_file(self, tmp_path):
        write(Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.txt")), "kept")
        os.mkfifo(tmp_path / "pipe.txt")
        assert pairs(tmp_path, folders=True) == [("caf\\xe9.txt", "kept")]


class TestGoingOn:
    """Whoever begins where some rows started reads the same rows, and none before them."""

    CONTENTS = {  # noqa: RUF012
        "a.txt": b"one\ntwo\n\xff\nfour\n\nsix\nseven",
        "a.jsonl": b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two"}\n{\n{"text": "\xc3\xbcber"}\n{"text": "six"}\n',
        "b.jsonl": b'{"text": "one", "_id": "x"}\n{"text": "two", "_id": "y"}\n{"text": "three", "_id": "z"}\n',
        "a.csv": b'id,text\na,"one\nline"\n\nb,two\nc\nd,"four "" quoted"\ne,five\n',
        "a.tsv": b"text\tn\none\t1\n\ntwo\t2\nthree\nfour\t4\n",
    }

    @staticmethod
    def demand_same(path, **settings):
        for size in (1, 2, 3):
            bad = []
            shards = read(path, max_rows=size, bad=bad.append, **settings)
            assert len(shards) > 1 or size == 3
            for number, shard in enumerate(shards):
                assert shard.start is not None
                again = read(path, max_rows=size, bad=bad.append, start=shard.start, **settings)
                assert again == shards[number:]

    @pytest.mark.parametrize("name", CONTENTS)
    def test_of_lines(self, tmp_path, name):
        self.demand_same(write(tmp_path / name, self.CONTENTS[name]))

    def test_of_parquet(self, tmp_path):
        broken = pa.array([b"%d" % number if number % 5 else b"\xff" for number in range(17)]).view(pa.string())
        table = pa.table({"text": broken, "id": [f"n{number}" for number in range(17)]})
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
        self.demand_same(tmp_path / "a.parquet")
        self.demand_same(tmp_path / "a.parquet", id_column="")

    def test_of_a_folder(self, tmp_path):
        for name, content in self.CONTENTS.items():
            write(tmp_path / name, content)
        (tmp_path / "a").mkdir()
        write(tmp_path / "a" / "deep.jsonl", '{"text": "deep"}\n')
        shards = read(tmp_path, max_rows=2, bad=lambda row: None, folders=True)
        assert len(shards) > 5
        gone_on = 0
        for number, shard in enumerate(shards):
            if shard.start is not None:  # a file that is one text is sent
                again = read(tmp_path, max_rows=2, bad=lambda row: None, start=shard.start, folders=True)
                assert again == shards[number:]
                gone_on += 1
        assert gone_on > 3

    def test_in_an_archive_nobody_goes_on(self, tmp_path):
        [rows] = read(write(tmp_path / "a.txt.gz", gzip.compress(b"one\ntwo")))
        assert rows.start is None
