"""Reading documents: every format, and one plain sentence for every way a file can be wrong."""

import gzip
import json
import lzma

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data.corpus import Document, clean_text, read_documents
from gerund.errors import ConfigError, DataError


def write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


def rows(*texts):
    return "".join(json.dumps({"title": f"T{i}", "text": text}) + "\n" for i, text in enumerate(texts))


class TestFormats:
    def test_jsonl_plain_and_compressed_agree(self, tmp_path):
        content = rows("one", "zwei äöü", "三\n四").encode("utf-8")
        plain = write(tmp_path / "a.jsonl", content)
        packed = write(tmp_path / "a.jsonl.xz", lzma.compress(content))
        zipped = write(tmp_path / "a.jsonl.gz", gzip.compress(content))
        expected = [Document("one", "T0"), Document("zwei äöü", "T1"), Document("三\n四", "T2")]
        for path in (plain, packed, zipped):
            assert list(read_documents([path])) == expected

    def test_a_text_file_is_one_document(self, tmp_path):
        path = write(tmp_path / "tale.txt", "\ufeffOnce upon\n\na time.\n")
        assert list(read_documents([path])) == [Document("Once upon\n\na time.\n", "tale")]

    def test_a_markdown_file_is_one_document_with_its_heading_as_title(self, tmp_path):
        bread = "Intro\n\n# How bread rises #\r\n\nYeast.\n"
        path = write(tmp_path / "bread.md.gz", gzip.compress(b"\xef\xbb\xbf" + bread.encode()))
        assert list(read_documents([path])) == [Document(bread, "How bread rises")]
        plain = write(tmp_path / "plain.md", "## No title\n\nA text.")
        assert [one.title for one in read_documents([plain])] == ["plain"]

    def test_parquet(self, tmp_path):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"body": ["one", "two"], "title": ["A", None]}), path)
        found = list(read_documents([path], text_column="body"))
        assert found == [Document("one", "A"), Document("two", "")]

    def test_documents_without_text_and_blank_lines_are_passed_over(self, tmp_path):
        path = write(tmp_path / "a.jsonl", rows("one") + "\n" + rows(" \n", "two"))
        assert [document.text for document in read_documents([path])] == ["one", "two"]

    def test_several_files_in_order(self, tmp_path):
        paths = [write(tmp_path / "b.txt", "b"), write(tmp_path / "a.txt", "a")]
        assert [document.text for document in read_documents(paths)] == ["b", "a"]

    def test_reads_no_further_than_asked(self, tmp_path):
        path = write(tmp_path / "a.jsonl", rows("fine") + "broken\n")
        assert next(iter(read_documents([path]))).text == "fine"


class TestMistakes:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b'{"body": "x", "title": "y"}', r"a\.jsonl, line 2: no field 'text'; present are: body, title"),
            (b'{"text": "\xff"}', "line 2: not valid UTF-8 at byte 10"),
        ],
    )
    def test_malformed_row_names_file_and_line(self, tmp_path, line, message):
        path = write(tmp_path / "a.jsonl", rows("fine").encode() + line + b"\n")
        with pytest.raises(DataError, match=message):
            list(read_documents([path]))

    def test_missing_file_and_unknown_format(self, tmp_path):
        with pytest.raises(DataError, match="no such file"):
            list(read_documents([tmp_path / "absent.jsonl"]))
        with pytest.raises(DataError, match=r"unknown file format; valid endings are: \.jsonl"):
            list(read_documents([write(tmp_path / "a.csv", "x")]))

    @pytest.mark.parametrize("ending", [".xz", ".gz"])
    def test_truncated_archive(self, tmp_path, ending):
        pack = lzma.compress if ending == ".xz" else gzip.compress
        whole = pack(rows(*(f"some text {i}" * 50 for i in range(200))).encode())
        path = write(tmp_path / f"a.jsonl{ending}", whole[: len(whole) // 2])
        with pytest.raises(DataError, match="broken or truncated archive"):
            list(read_documents([path]))

    def test_parquet_without_the_column_and_no_parquet(self, tmp_path):
        pq.write_table(pa.table({"body": ["one"], "n": [1]}), tmp_path / "a.parquet")
        with pytest.raises(DataError, match="no column 'text'; present are: body, n"):
            list(read_documents([tmp_path / "a.parquet"]))
        with pytest.raises(DataError, match="row 1: 'n' is not a text but int"):
            list(read_documents([tmp_path / "a.parquet"], text_column="n"))
        with pytest.raises(DataError, match="not a readable parquet file"):
            list(read_documents([write(tmp_path / "b.parquet", "no parquet")]))


class TestCleaning:
    def test_gutenberg_joins_prose_and_keeps_verse(self):
        prose = "It was the best of times, it was the worst of times, it was\nthe age of wisdom, and so on."
        verse = "Tyger Tyger, burning bright,\n  In the forests of the night;"
        cleaned = clean_text(f"CHAPTER I\r\n\r\n\r\n{prose}\n\n* * *\n\n[Picture: A tiger]\n\n{verse}\n", "gutenberg")
        assert cleaned == (
            "CHAPTER I\n\nIt was the best of times, it was the worst of times, it was the age of wisdom, "
            "and so on.\n\nTyger Tyger, burning bright,\nIn the forests of the night;"
        )

    def test_emphasis_goes_and_snake_case_stays(self):
        assert clean_text("He _did_ say snake_case_name.", "gutenberg") == "He did say snake_case_name."

    def test_wikipedia_loses_empty_brackets(self):
        assert clean_text("Fraile () (; ) is (a) hill.", "wikipedia") == "Fraile is (a) hill."

    @pytest.mark.parametrize(
        ("text", "cleaned"),
        [
            ("A grid:\n\n+---+----+\n| a | b  |\n+---+----+\n\nIts end.", "A grid:\n\nIts end."),
            ("  Year   Team        Goals\n  1994   Eintracht   14\n\nHe retired.", "He retired."),
            ("1.  First item here\n2.  Second item (_sic_)", "First item here\nSecond item (sic)"),
            (
                "seen from the north]] CONRAD GRÜNENBERG was a knight of NATO.",
                "Conrad Grünenberg was a knight of NATO.",
            ),
            ("[TABLE]\n\nsnake_case_name stays, http://a.b/c goes.", "snake_case_name stays, goes."),
            ("12 | 14 | 3\n\n1994 14 27 3.5 (88)", ""),
        ],
    )
    def test_pandoc_loses_the_rests_of_markup(self, text: str, cleaned: str):
        assert clean_text(text, "pandoc") == cleaned

    def test_none_changes_nothing_and_unknown_is_refused(self):
        assert clean_text(" _a_ ()\n", "none") == " _a_ ()\n"
        valid = "valid are: none, gutenberg, wikipedia, pandoc"
        with pytest.raises(ConfigError, match=f"unknown text cleaning 'html'; {valid}"):
            clean_text("x", "html")


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("v1.2 release notes.txt", "A text.", "v1.2 release notes"),
        ("Dr. Jekyll.MD", "A text.", "Dr. Jekyll"),
        ("guide.md", "```sh\n# install it\npip install x\n```\n\n# The Guide\n", "The Guide"),
        ("open.md", "~~~\n# no title\n", "open"),
    ],
)
def test_titles_are_whole_names_or_headings(tmp_path, name, text, title):
    [found] = read_documents([write(tmp_path / name, text)])
    assert found.title == title


def test_two_columns_of_one_name_are_refused(tmp_path):
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="2 columns are called 'text'; rename one of them"):
        list(read_documents([tmp_path / "a.parquet"]))
