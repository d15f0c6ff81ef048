"""Rows out of every format, in shards that can be begun anywhere; errors and bad rows name file and line."""

import gzip
import io
import json
import lzma
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data.tables import BadRow, Rows, open_table, read_rows
from gerund.errors import ConfigError, DataError, TextError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def parquet(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def read(path, max_rows=1000, max_characters=2**20, bad=None, start=None, **settings):
    table = open_table(path, **settings)
    return list(read_rows(table, max_rows=max_rows, max_characters=max_characters, bad=bad, start=start))


def pairs(path, **settings):
    return [pair for rows in read(path, **settings) for pair in zip(rows.ids, rows.texts, strict=True)]


def refused(path, **settings):
    with pytest.raises(DataError) as caught:
        read(path, **settings)
    message = str(caught.value)
    assert str(path) in message
    return message.removeprefix(str(path))


class TestFormats:
    def test_txt_is_one_text_a_line_numbered_from_0(self, tmp_path):
        path = write(tmp_path / "a.txt", "\ufeffone\r\ntwo \n\nlast, without an end")
        assert pairs(path) == [(0, "one"), (1, "two "), (2, ""), (3, "last, without an end")]

    def test_jsonl_takes_ids_where_the_first_row_has_one(self, tmp_path):
        lines = [{"id": "a", "text": "one"}, {"text": None, "id": 7}, {"id": 0.5, "text": "Grüße"}]
        path = write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, lines)))
        assert pairs(path) == [("a", "one"), (7, ""), ("0.5", "Grüße")]
        assert pairs(path, id_column="") == [(0, "one"), (1, ""), (2, "Grüße")]

    def test_jsonl_without_ids_and_another_column(self, tmp_path):
        path = write(tmp_path / "a.ndjson", '{"q": "one", "key": "k"}\n\n{"q": "two", "key": 2, "id": 9}\n')
        assert pairs(path, column="q") == [(0, "one"), (1, "two")]
        assert pairs(path, column="q", id_column="key") == [("k", "one"), (2, "two")]
        [rows] = read(path, column="q")
        assert rows.place(1) == f"{path}, line 3"

    def test_csv_with_quotes_line_breaks_and_long_fields(self, tmp_path):
        long = "word " * 60_000
        path = write(tmp_path / "a.csv", f'id,text\n1,"a ""b"", c\nnext line"\n\nx,{long}\n')
        assert pairs(path) == [("1", 'a "b", c\nnext line'), ("x", long)]
        [rows] = read(path)
        assert rows.lines == [2, 5]

    def test_tsv_has_no_quoting(self, tmp_path):
        path = write(tmp_path / "a.tsv", 'score\ttext\r\n5\t"Stop, he said.\r\n4\ta\rb "c"\r\n')
        assert pairs(path) == [(0, '"Stop, he said.'), (1, 'a\rb "c"')]

    def test_parquet(self, tmp_path):
        path = parquet(tmp_path / "a.parquet", text=["one", None, "three"], id=[3, 2, 1], n=[0.5, 1, 2])
        assert pairs(path) == [(3, "one"), (2, ""), (1, "three")]
        assert pairs(path, id_column="n") == [("0.5", "one"), ("1.0", ""), ("2.0", "three")]
        coded = parquet(tmp_path / "b.parquet", text=pa.array(["x", "y", "x"]).dictionary_encode())
        assert pairs(coded) == [(0, "x"), (1, "y"), (2, "x")]
        [rows] = read(coded)
        assert rows.place(2) == f"{coded}, row 3"

    @pytest.mark.parametrize("ending, pack", [(".gz", gzip.compress), (".xz", lzma.compress)])
    def test_compressed(self, tmp_path, ending, pack):
        assert pairs(write(tmp_path / f"a.v2.txt{ending}", pack(b"one\ntwo\n"))) == [(0, "one"), (1, "two")]

    def test_format_by_name_beats_the_ending(self, tmp_path):
        assert pairs(write(tmp_path / "a.dat", '{"text": "one"}'), format="jsonl") == [(0, "one")]

    @pytest.mark.parametrize("format, content", [(None, "one\ntwo\n"), ("csv", "text\none\ntwo\n")])
    def test_standard_input(self, monkeypatch, format, content):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
        assert pairs("-", format=format) == [(0, "one"), (1, "two")]


class TestLots:
    def test_rows_and_characters_bound_a_lot(self, tmp_path):
        texts = ["a" * 5, "b" * 5, "c" * 30, "d", "e", "f", "g"]
        path = write(tmp_path / "a.txt", "\n".join(texts))
        found = read(path, max_rows=3, max_characters=10)
        assert [rows.texts for rows in found] == [texts[:2], texts[2:3], texts[3:6], texts[6:]]
        assert [rows.ids for rows in found] == [[0, 1], [2], [3, 4, 5], [6]]

    def test_a_lot_is_read_when_it_is_asked_for(self, tmp_path):
        path = write(tmp_path / "a.txt", b"one\ntwo\nthree\n\xff")
        shards = read_rows(open_table(path), max_rows=2)
        assert next(shards).texts == ["one", "two"]
        with pytest.raises(DataError, match="line 4: not valid UTF-8"):
            next(shards)

    def test_empty_rows_can_be_found_and_left_out(self):
        rows = Rows([4, 5, 6], ["a", " \t", ""], [1, 2, 3], "x")
        assert rows.empty()[0] == 1
        full = rows.without(rows.empty())
        assert full == Rows([4], ["a"], [1], "x")
        assert full.empty() == []
        assert full.without([]) is full

    def test_errors_about_a_text_get_its_place(self):
        rows = Rows([4, 5], ["a", "b"], [10, 12], "x.csv")
        assert str(rows.named(TextError.about("text", 1, "has 9 tokens"))) == "x.csv, line 12: the text has 9 tokens"
        assert isinstance(rows.named(TextError.about("prompt", 0, "is odd")), TextError)
        other = ConfigError("batch_tokens=0 leaves no room for a text")
        assert rows.named(other) is other


class TestMistakes:
    def test_no_file(self, tmp_path):
        assert "no such file" in refused(tmp_path / "absent.txt")
        assert "is a folder" in refused(tmp_path)

    @pytest.mark.parametrize("name", ["a.docx", "a", "a.gz", "a.parquet.gz", ".txt"])
    def test_unknown_ending(self, tmp_path, name):
        assert "valid endings are: .ndjson, .txt" in refused(write(tmp_path / name, "x"))

    def test_unknown_format(self, tmp_path):
        with pytest.raises(ConfigError, match="unknown format 'xml'; valid are: txt, jsonl"):
            open_table(write(tmp_path / "a.txt", "x"), format="xml")

    def test_a_txt_has_no_columns(self, tmp_path):
        with pytest.raises(ConfigError, match="no column 'title'"):
            open_table(write(tmp_path / "a.txt", "x"), column="title")

    def test_parquet_on_standard_input(self):
        with pytest.raises(ConfigError, match="cannot be read from standard input"):
            read("-", format="parquet")

    @pytest.mark.parametrize(
        "name, content, message",
        [
            ("a.jsonl", "[" * 200_000, ", line 1: not valid JSON"),
            ("a.jsonl", '{"text": "a"}\n\n{"txt": "b", "n": 1}', ", line 3: no column 'text'; present are: txt, n"),
            ("a.jsonl", '{"text": "\\ud800 x"}', ", line 1: 'text' holds a lone surrogate"),
            ("a.jsonl", '{"text": "a", "id": "\\udc00"}', ", line 1: 'id' holds a lone surrogate"),
            ("a.jsonl", '{"text": "a", "id": 1}\n{"text": "b"}', ", line 2: no column 'id'; present are: text"),
            ("a.txt", b"fine\nfine\nbr\xffken", ", line 3: not valid UTF-8 at byte 2"),
            ("a.txt", "\ufefftext".encode("utf-16"), ", line 1: not valid UTF-8"),
            ("a.csv", "id,txt\n1,a", ", line 1: no column 'text'; present are: id, txt"),
            ("a.csv", "id,text,text\n1,a,b", ", line 1: 2 columns are called 'text'"),
            ("a.tsv", "id\ttext\n1", ", line 2: malformed row (1 fields, and the header has 2)"),
            ("a.txt.gz", b"no archive", ": broken or truncated archive"),
            ("a.txt.xz", lzma.compress(b"x" * 999)[:-9], ": broken or truncated archive"),
            ("a.parquet", b"no parquet", ": not a readable parquet file"),
        ],
    )
    def test_malformed(self, tmp_path, name, content, message):
        assert message in refused(write(tmp_path / name, content))

    def test_parquet_columns(self, tmp_path):
        path = parquet(tmp_path / "a.parquet", body=["a"], text=[1])
        assert "row 1: 'text' is not a text but int64" in refused(path)
        assert "no column 'title'; present are: body, text" in refused(path, column="title")
        assert "no column 'key'; present are: body, text" in refused(path, column="body", id_column="key")

    def test_parquet_with_bytes_that_are_no_text(self, tmp_path):
        broken = pa.array([b"ok", b"\xff"]).view(pa.string())
        assert "row 2: not valid UTF-8 at byte 0" in refused(parquet(tmp_path / "a.parquet", text=broken))


class TestFolders:
    @pytest.fixture
    def folder(self, tmp_path):
        (tmp_path / "deep" / "out.parquet.parts").mkdir(parents=True)
        write(tmp_path / "b.txt", "one\ntwo\n\n")
        write(tmp_path / "deep" / "a.txt.gz", gzip.compress(b"three"))
        write(tmp_path / "deep" / "rows.jsonl", '{"text": "four", "_id": "x"}\n{"text": "five", "_id": "y"}\n')
        write(tmp_path / "deep" / "out.parquet.parts" / "c.txt", "never")
        for ignored in (".hidden.txt", "picture.png", "notes.md~"):
            write(tmp_path / ignored, "never")
        return tmp_path

    def test_a_txt_file_is_a_text_and_a_row_of_others_is_one(self, folder):
        found = pairs(folder, folders=True)
        assert found == [
            ("b.txt", "one\ntwo"),
            ("deep/a.txt.gz", "three"),
            ("deep/rows.jsonl#x", "four"),
            ("deep/rows.jsonl#y", "five"),
        ]

    def test_places_name_the_file(self, folder):
        [rows] = read(folder, folders=True)
        assert rows.place(0) == str(folder / "b.txt")
        assert rows.place(3) == f"{folder / 'deep' / 'rows.jsonl'}, line 2"
        write(folder / "deep" / "rows.jsonl", '{"text": 4}\n')
        assert refused(folder, folders=True) == "/deep/rows.jsonl, line 1: 'text' is not a text but int"

    def test_a_single_file_keeps_its_ids(self, folder):
        assert pairs(folder / "deep", folders=True)[1][0] == "rows.jsonl#x"
        (folder / "deep" / "a.txt.gz").unlink()
        assert pairs(folder / "deep", folders=True) == [("x", "four"), ("y", "five")]

    def test_of_a_collection_the_documents_are_read(self, tmp_path):
        (tmp_path / "qrels").mkdir()
        write(tmp_path / "qrels" / "test.tsv", "query-id\tcorpus-id\tscore\n")
        write(tmp_path / "queries.jsonl", '{"_id": "q", "text": "who"}\n')
        write(tmp_path / "corpus.jsonl", '{"_id": "d", "title": "T", "text": "what"}\n')
        assert pairs(tmp_path, folders=True) == [("d", "what")]

    def test_only_for_those_who_ask(self, folder, tmp_path):
        assert refused(folder) == " is a folder, not a file"
        (tmp_path / "empty").mkdir()
        assert "no file of texts in it; valid endings are: .ndjson, .txt" in refused(tmp_path / "empty", folders=True)
        with pytest.raises(ConfigError, match="the endings of its files give their formats"):
            open_table(folder, folders=True, format="txt")


@pytest.mark.parametrize("ending", ["jsonl", "csv", "parquet"])
def test_ids_may_be_called_as_beir_calls_them(tmp_path, ending):
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        parquet(path, _id=["x"], text=["one"])
    else:
        write(path, '{"_id": "x", "text": "one"}\n' if ending == "jsonl" else "_id,text\nx,one\n")
    assert pairs(path) == [("x", "one")]
    assert pairs(path, id_column="") == [(0, "one")]


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
