"""Every kind of file, and every mistake that one can hold."""

import gzip
import zipfile
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.errors import DataError
from gerund.retrieval import reading
from gerund.retrieval.markup import ParsedText, html, markdown
from gerund.retrieval.reading import digest_of, find_files, read_file


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(path):
    return [(one.key, one.title, one.text) for one in read_file(path)]


def test_text_is_the_file_itself(tmp_path):
    content = "\ufeffOne.\r\n\r\nTwo — three.\n"
    assert texts(write(tmp_path / "a.txt", content)) == [("", "", content[1:])]
    assert texts(write(tmp_path / "a.txt.gz", gzip.compress(content.encode()))) == [("", "", content[1:])]


def test_markdown_keeps_its_characters_and_gains_sections(tmp_path):
    text = "# Bread\r\n\r\nFlour.\r\n\r\n"
    text += "```\r\n# no heading\r\n```\r\n\r\nRye *bread*\n-----\nDark.\n### Deep ###\nSour.\n"
    [found] = read_file(write(tmp_path / "a.md", text))
    assert found.text == text
    assert [(text[one.start :][:5], one.path) for one in found.sections] == [
        ("# Bre", ("Bread",)),
        ("Rye *", ("Bread", "Rye bread")),
        ("### D", ("Bread", "Rye bread", "Deep")),
    ]
    assert found.title == "Bread"


@pytest.mark.parametrize(
    ("text", "headings"),
    [
        ("text\n---\n", ["text"]),
        ("two\nlines\n---\n", []),  # a rule
        ("- item\n---\n", []),
        ("#hashtag\n", []),
        ("# \n", []),
        ("    # code\n", []),
        ("~~~\n# a\n~~~\n# b\n", ["b"]),
        ("````\n```\n# a\n````\n# b\n", ["b"]),
        ("```\n# never closed\n", []),
        ("# [A link](b.md) `x`\n", ["A link x"]),
        ("---\ntitle: T\ndate: 1\n---\n# a\n", ["a"]),
        ("", []),
    ],
)
def test_headings_of_markdown(text, headings):
    assert [one.path[-1] for one in markdown(text).sections] == headings


def test_the_title_of_front_matter_wins():
    assert markdown("---\ntitle: 'My page'\n---\n# Another\n").title == "My page"
    assert markdown("## Second\n# First\n").title == "First"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>One<p>Two", "One\n\nTwo"),
        ("<p>a <b>bold</b>, word</p>", "a bold, word"),
        ("a<br>b<br/>c", "a\nb\nc"),
        ("<ul><li>x</li><li>y</li></ul>", "- x\n- y"),
        ("<table><tr><th>Egg</th><th>5</th></tr><tr><td>a</td><td>b</td></tr></table>", "Egg | 5\na | b"),
        ("<pre>a\n  b</pre>", "a\n  b"),
        ("<script>x</script><style>y</style><nav>menu<p>deep</nav>text<footer>f</footer>", "text"),
        ("<p>&lt;tag&gt; &amp; &eacute;&#233;</p>", "<tag> & éé"),
        ("<head><title>T</title></head><body>b</body>", "b"),
        ("<title>T</title><svg><title>no</title></svg>b", "b"),
        ("no markup at all", "no markup at all"),
        ("<p>  spaces \n and   lines </p>", "spaces and lines"),
        ("<nav><img><br></nav>x", "x"),
        ("", ""),
    ],
)
def test_html_is_what_a_reader_sees(page, text):
    assert html(page).text == text


def test_headings_of_html_stand_where_they_say():
    found = html("<p>Before</p><h1> Top <i>one</i></h1><p>x</p><h3>Deep</h3>y<h2></h2><h1>Next</h1>")
    assert [(found.text[one.start :].split("\n")[0], one.path) for one in found.sections] == [
        ("Top one", ("Top one",)),
        ("Deep", ("Top one", "Deep")),
        ("Next", ("Next",)),
    ]
    assert found.title == "Top one"


ROWS = [("7", "Tea", "Hot."), ("8", "", "Cold.")]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "a.jsonl",
            '{"_id": 7, "title": "Tea", "text": "Hot."}\n\n{"id": "8", "text": "Cold."}\n{"id": 9, "text": null}\n',
        ),
        ("a.csv", 'id,text,title\n7,"Hot.",Tea\n\n8,Cold.,\n9,,\n'),
        ("a.tsv", "title\t_id\ttext\nTea\t7\tHot.\n\t8\tCold.\n"),
    ],
)
def test_rows_of_tables(tmp_path, name, content):
    assert texts(write(tmp_path / name, content)) == ROWS


def test_rows_of_parquet_and_rows_without_ids(tmp_path):
    table = {"_id": [7, 8], "title": ["Tea", None], "text": ["Hot.", "Cold."], "more": [1.0, 2.0]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ROWS
    assert texts(write(tmp_path / "b.jsonl", '{"text": "a"}\n\n{"text": "b"}\n')) == [("1", "", "a"), ("3", "", "b")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "not valid UTF-8 at byte 0"),
        ("a.txt", "  \n", "there is no text in it"),
        ("a.html", "<script>x</script>", "there is no text in it"),
        ("a.xyz", "x", "unknown kind of file; known are: .txt, .md"),
        ("noending", "x", "unknown kind of file"),
        ("a.txt.gz", b"no archive", "broken or truncated archive"),
        ("a.jsonl", '{"text": "a"}\n{\n', "a.jsonl, line 2: not valid JSON"),
        ("a.jsonl", "[1]\n", "line 1: expected a JSON object, found list"),
        ("a.jsonl", '{"body": "a"}\n', "line 1: no column 'text'; present are: body"),
        ("a.jsonl", '{"text": 5}\n', "'text' is not a text but int"),
        ("a.jsonl", '{"text": "\\ud800"}\n', "lone surrogate"),
        ("a.jsonl", '{"text": "a", "id": [1]}\n', "the id 'id' is neither a text nor a number but list"),
        ("a.jsonl", '{"text": "a", "title": 5}\n', "'title' is not a text but int"),
        ("a.csv", "id,text\n1\n", "a.csv, line 2: malformed row (1 fields, and the header has 2)"),
        ("a.csv", 'text\n"open\n', "line 2: malformed row"),
        ("a.csv", "", "there is no text in it"),
        ("a.parquet", b"PAR1", "not a readable parquet file"),
        ("a.pdf", b"%PDF-1.4 nothing", "not a readable PDF"),
        ("a.docx", b"nothing", "not a readable Word document"),
        ("a.epub", b"nothing", "not a readable EPUB"),
    ],
)
def test_mistakes_name_the_file(tmp_path, name, content, message):
    with pytest.raises(DataError) as caught:
        texts(write(tmp_path / name, content))
    assert str(tmp_path / name)[-20:] in str(caught.value)
    assert message in str(caught.value)


def book(path, pages, container="content.opf"):
    items = "".join(
        f'<item id="p{n}" href="{name}" media-type="application/xhtml+xml"/>' for n, name in enumerate(pages)
    )
    spine = "".join(f'<itemref idref="p{n}"/>' for n in range(len(pages)))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("META-INF/container.xml", f'<container><rootfile full-path="OPS/{container}"/></container>')
        archive.writestr("OPS/content.opf", f"<opf:package><opf:manifest>{items}</opf:manifest>{spine}</opf:package>")
        for name, page in pages.items():
            archive.writestr(f"OPS/{name.replace('%20', ' ')}", page)
    return path


def test_books_are_read_page_by_page(tmp_path):
    pages = {"b%20one.xhtml": "<title>Book</title><h1>One</h1><p>a</p>", "a.xhtml": "<h1>Two</h1><p>b</p>"}
    [found] = read_file(book(tmp_path / "a.epub", pages))
    assert found.text == "One\n\na\n\nTwo\n\nb"
    assert (found.title, [(one.start, one.path) for one in found.sections]) == ("Book", [(0, ("One",)), (8, ("Two",))])
    with pytest.raises(DataError, match="not a readable EPUB"):
        texts(book(tmp_path / "b.epub", pages, container="missing.opf"))


def test_a_page_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "_LARGEST_PAGE", 2**20)
    with pytest.raises(DataError, match="is larger than 1 MiB"):
        texts(book(tmp_path / "a.epub", {"a.xhtml": "x" * (2**20 + 1)}))


def test_word_documents(tmp_path):
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    kinds = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    packages = "http://schemas.openxmlformats.org/package/2006"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{packages}/content-types"><Override '
        'PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.'
        'document.main+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{packages}/relationships"><Relationship '
        f'Id="r1" Type="{kinds}/officeDocument" Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{word}"><w:body><w:p><w:pPr><w:pStyle w:val="Heading1"/>'
        "</w:pPr><w:r>"
        "<w:t>Bread</w:t></w:r></w:p><w:p><w:r><w:t>Flour and water.</w:t></w:r></w:p></w:body></w:document>",
        "word/styles.xml": f'<w:styles xmlns:w="{word}"><w:style w:type="paragraph" w:styleId="Heading1"><w:name '
        'w:val="heading 1"/></w:style></w:styles>',
    }  # fmt: skip
    with zipfile.ZipFile(tmp_path / "a.docx", "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    [found] = read_file(tmp_path / "a.docx")
    assert (found.text, found.title) == ("Bread\n\nFlour and water.", "Bread")


def pdf(lines):
    """Write a PDF by hand: a page a line of text."""
    drawn = [f"BT /F1 12 Tf 20 100 Td ({line}) Tj ET".encode() for line in lines]
    kids = " ".join(f"{4 + 2 * n} 0 R" for n in range(len(lines)))
    objects = [
        b"<</Type/Catalog/Pages 2 0 R>>",
        f"<</Type/Pages/Count {len(lines)}/Kids[{kids}]>>".encode(),
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
    ]
    for n, content in enumerate(drawn):
        page = f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 200]/Contents {5 + 2 * n} 0 R"
        page += "/Resources<</Font<</F1 3 0 R>>>>>>"
        objects += [page.encode(), b"<</Length %d>>\nstream\n%s\nendstream" % (len(content), content)]
    out, places = b"%PDF-1.4\n", []
    for number, one in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, one)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(objects) + 1
    end = b"trailer\n<</Size %d/Root 1 0 R>>\nstartxref\n%d\n%%%%EOF\n" % (size, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table) + end


def test_pdf(tmp_path):
    assert texts(write(tmp_path / "a.pdf", pdf(["A sentence that", "goes on."]))) == [
        ("", "", "A sentence that\ngoes on.")
    ]
    with pytest.raises(DataError, match="there is no text in it; are its pages pictures of text"):
        texts(write(tmp_path / "b.pdf", pdf([""])))


def test_readers_of_other_packages(tmp_path, monkeypatch):
    def broken(path):
        raise ValueError("odd")

    class Entry:
        def __init__(self, name, function):
            self.name, self.value, self._function = name, f"package:{name}", function

        def load(self):
            return self._function

    found = [Entry(".scan", lambda path: f"# {path.stem}\n\nRead."), Entry("odd", broken), Entry("five", lambda _: 5)]
    found.append(Entry("pdf", lambda path: f"# {path.stem}\n\nRead from its pictures."))
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: found if group == "gerund.readers" else [])
    reading._others.cache_clear()
    try:
        [one] = read_file(write(tmp_path / "page.scan", "x"))
        assert one == ParsedText("# page\n\nRead.", "page", one.sections)
        with pytest.raises(DataError, match=r"the reader package:odd failed on it \(odd\)"):
            texts(write(tmp_path / "a.odd", "x"))
        with pytest.raises(DataError, match="is not a text but int"):
            texts(write(tmp_path / "a.five", "x"))
        assert [path.name for path in find_files([tmp_path])] == ["a.five", "a.odd", "page.scan"]
        # Another reader takes the place of one that is known here.
        assert texts(write(tmp_path / "own.pdf", pdf([""]))) == [("", "own", "# own\n\nRead from its pictures.")]
        assert reading.endings().count("pdf") == 1
    finally:
        reading._others.cache_clear()


def test_files_of_folders(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.csv", ".hidden.txt", ".git/x.txt", "picture.png", "d.txt.gz"):
        write(tmp_path / name, "x")
    assert [str(path.relative_to(tmp_path)) for path in find_files([tmp_path])] == [
        "a.md",
        "b.txt",
        "d.txt.gz",
        "sub/c.csv",
    ]
    # One that is named is read whatever it is called, and once.
    named = [tmp_path / "b.txt", tmp_path / "picture.png", tmp_path]
    assert [path.name for path in find_files(named)] == ["b.txt", "picture.png", "a.md", "d.txt.gz", "c.csv"]
    with pytest.raises(DataError, match="no such file or folder"):
        find_files([tmp_path / "nowhere"])


def test_hashes_are_of_the_bytes(tmp_path):
    assert digest_of(write(tmp_path / "a", "x")) == digest_of(write(tmp_path / "b", "x"))
    assert digest_of(tmp_path / "a") != digest_of(write(tmp_path / "c", "y"))
    with pytest.raises(DataError, match="cannot be read"):
        digest_of(tmp_path)
