"""Every kind of file and every encoding, and every mistake that one can hold."""

import codecs
import gzip
import zipfile
from importlib import metadata
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data.files import decode
from gerund.errors import DataError
from gerund.retrieval import document_reader
from gerund.retrieval.document_reader import DocumentReader, digest_of, find_files
from gerund.retrieval.formats import ParsedText, decoded, html, markdown


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.fixture(scope="module", autouse=True)
def reader():
    """One process for all files of this module."""
    with DocumentReader() as opened:
        yield opened


@pytest.fixture
def texts(reader):
    return lambda path: [(one.key, one.title, one.text) for one in reader.read(path)]


def test_text_is_the_file_itself(tmp_path, texts):
    content = "\ufeffOne.\r\n\r\nTwo — three.\n"
    assert texts(write(tmp_path / "a.txt", content)) == [("", "", content[1:])]
    assert texts(write(tmp_path / "a.txt.gz", gzip.compress(content.encode()))) == [("", "", content[1:])]


def test_markdown_keeps_its_characters_and_gains_sections(tmp_path, reader):
    text = "# Bread\r\n\r\nFlour.\r\n\r\n"
    text += "```\r\n# no heading\r\n```\r\n\r\nRye *bread*\n-----\nDark.\n### Deep ###\nSour.\n"
    [found] = reader.read(write(tmp_path / "a.md", text))
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
        ("three\nlines\nhere\n---\n", []),
        ("one\nrule\n---\ntext\n---\n", ["text"]),
        ("```pip install x```\n\n# a\n", ["a"]),  # code within a line
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


def test_rows_without_text_are_counted(reader, tmp_path, caplog):
    path = tmp_path / "faq.csv"
    path.write_text("id,title,text\na,Hours,We open at nine.\nb,Empty,\nc,Blank,  \n", "utf-8")
    assert [parsed.text for parsed in reader.read(path)] == ["We open at nine."]
    assert caplog.messages == [f"{path}: rows without text are left out: 2"]


def test_the_title_of_front_matter_wins():
    assert markdown("---\ntitle: 'My page'\n---\n# Another\n").title == "My page"
    assert markdown("## Second\n# First\n").title == "First"


@pytest.mark.parametrize(
    ("page", "text"),
    [
        ("<p>One<p>Two", "One\n\nTwo"),
        ("<p>a <b>bold</b>, <a href=b.html>linked</a> word</p>", "a bold, linked word"),
        ("a<br>b<br/>c", "a\nb\nc"),
        ("<ul><li>x</li><li>y</li></ul>", "- x\n- y"),
        ("<pre>a\n  b</pre>", "```\na\n  b\n```"),
        ("<script>x</script><style>y</style>text", "text"),
        ("<p>&lt;tag&gt; &amp; &eacute;&#233;</p>", "<tag> & éé"),
        ("<head><title>T</title></head><body>b</body>", "b"),
        ("no markup at all", "no markup at all"),
        ("<p>  spaces \n and   lines </p>", "spaces\nand lines"),
        ("", ""),
        # A row stays a row, and a cell its column, without end tags and with paragraphs in cells too, as Word has them.
        (
            "<table><tr><th>Town<th>May<th>June</tr><tr><td>Oslo<td><td>17</tr><tr><td><td>9<td>12</tr></table>",
            "| Town | May | June |\n| --- | --- | --- |\n| Oslo |  | 17 |\n|  | 9 | 12 |",
        ),
        (
            "<table><tr><td><p>Name</p></td><td><p>Age</p></td></tr><tr><td><p>Ann</p></td><td><p>31</p></td></tr></table>",
            "| Name | Age |\n| --- | --- |\n| Ann | 31 |",
        ),
        (
            "<table><tr><th colspan=2>Both<th>C</tr><tr><td rowspan=2>a<td>b<td>c</tr><tr><td>d<td>e</tr></table>",
            "| Both | | C |\n| --- | --- | --- |\n| a | b | c |\n|  | d | e |",
        ),
        # What holds a page, or belongs to its text, is read whatever its element is called.
        ("<form id=f><h1>Opening hours</h1><p>We open at nine.</p></form><p>Copyright.</p>",
         "# Opening hours\n\nWe open at nine.\n\nCopyright."),
        ("<p>Mix well.</p><aside class=warning><p>Never mix acid and bleach.</p></aside>",
         "Mix well.\n\nNever mix acid and bleach."),
        ("<blockquote><p>To be.</p><footer>Shakespeare</footer></blockquote>", "> To be.\n>\n> Shakespeare"),
        ("<p>Press <button>Save</button> to keep your work.</p>", "Press Save to keep your work."),
        ("<p>Energy <math><mi>E</mi><mo>=</mo><mi>m</mi><msup><mi>c</mi><mn>2</mn></msup></math>.", "Energy E=mc^2."),
        ("<header><h1>Title</h1></header><dialog open>Said.</dialog>", "# Title\n\nSaid."),
        # A menu is left out, and a page that somebody put into its element is not.
        ("<nav><ul><li><a href=/a>Home</a><li>More</ul></nav><p>Body", "Body"),
        ("<nav><ul><li><a href=/a>Home</a></ul><p>All of the page.", "- Home\n\nAll of the page."),
        ("<nav><ul><li>Home</ul></nav>", "- Home"),
    ],
)  # fmt: skip
def test_html_is_what_a_reader_sees(page, text):
    assert html(page).text == text


def test_headings_of_html_stand_where_they_say():
    found = html("<p>Before</p><h1> Top <i>one</i></h1><p>x</p><h3>Deep</h3>y<h2></h2><h1>Next</h1>")
    assert [(found.text[one.start :].split("\n")[0], one.path) for one in found.sections] == [
        ("# Top one", ("Top one",)),
        ("### Deep", ("Top one", "Deep")),
        ("# Next", ("Next",)),
    ]
    assert found.title == "Top one"
    assert html("<title> My \n page </title><h1>Other</h1>").title == "My page"


@pytest.mark.parametrize(
    "text",
    ["# " + "[" * 40_000, "# " + "![x](" * 20_000, "# a" + " " * 40_000 + "b", "# " + " #" * 20_000 + "x",
     "---\ntitle: a" + " " * 40_000 + "b\n---\n", "-" * 40_000 + "x", "# " + "*" * 40_000, "\n\n" * 20_000],
)  # fmt: skip
@pytest.mark.timeout(20)
def test_hostile_markdown_takes_no_time(text):
    assert all(len(one.path[-1]) < 400 for one in markdown(text).sections)


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
def test_rows_of_tables(tmp_path, texts, name, content):
    assert texts(write(tmp_path / name, content)) == ROWS
    assert texts(write(tmp_path / f"{name}.gz", gzip.compress(content.encode()))) == ROWS


def test_rows_of_parquet_and_rows_without_ids(tmp_path, texts):
    table = {"_id": [7, 8], "title": ["Tea", None], "text": ["Hot.", "Cold."], "more": [1.0, 2.0]}
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == ROWS
    assert texts(write(tmp_path / "b.jsonl", '{"text": "a"}\n\n{"text": "b"}\n')) == [("L1", "", "a"), ("L3", "", "b")]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe", "there is no text in it"),
        ("a.txt", bytes(range(128, 256)) * 20 + b"\0", "its encoding cannot be detected; save it as UTF-8"),
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
        ("a.html", "<div>" * 5000 + "x", "a.html: its elements are nested too deeply"),
        ("a.html", "<table>" + "<tr><td colspan=1000>x" * 300, "its tables would grow to"),
    ],
)
def test_mistakes_name_the_file(tmp_path, texts, name, content, message):
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


def test_books_are_read_page_by_page(tmp_path, reader, texts):
    pages = {"b%20one.xhtml": "<title>Book</title><h1>One</h1><p>a</p>", "a.xhtml": "<h1>Two</h1><p>b</p>"}
    [found] = reader.read(book(tmp_path / "a.epub", pages))
    assert found.text == "# One\n\na\n\n# Two\n\nb"
    assert (found.title, [(one.start, one.path) for one in found.sections]) == ("Book", [(0, ("One",)), (10, ("Two",))])
    with pytest.raises(DataError, match="not a readable EPUB"):
        texts(book(tmp_path / "b.epub", pages, container="missing.opf"))


def test_pages_of_books_say_their_encoding(tmp_path, reader):
    page = '<?xml version="1.0" encoding="iso-8859-1"?><html><p>café</p></html>'.encode("latin-1")
    [found] = reader.read(book(tmp_path / "a.epub", {"a.xhtml": page}))
    assert (found.text, found.encoding) == ("café", "windows-1252 (declared)")


WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def word(path, body):
    kinds = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
    math = "http://schemas.openxmlformats.org/officeDocument/2006/math"
    packages = "http://schemas.openxmlformats.org/package/2006"
    parts = {
        "[Content_Types].xml": f'<Types xmlns="{packages}/content-types"><Override '
        'PartName="/word/document.xml" ContentType="application/vnd.openxmlformats-officedocument.wordprocessingml.'
        'document.main+xml"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{packages}/relationships"><Relationship '
        f'Id="r1" Type="{kinds}/officeDocument" Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{WORD}" xmlns:m="{math}"><w:body>{body}</w:body></w:document>',
        "word/styles.xml": f'<w:styles xmlns:w="{WORD}"><w:style w:type="paragraph" w:styleId="Heading1"><w:name '
        'w:val="heading 1"/></w:style></w:styles>',
    }  # fmt: skip
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return path


def paragraph(text, style=""):
    return f"<w:p>{style}<w:r><w:t>{text}</w:t></w:r></w:p>"


def test_word_documents(tmp_path, reader):
    cells = [[paragraph(text) if text else "<w:p/>" for text in row] for row in (["Name", "Age"], ["", "31"])]
    table = "".join(f"<w:tr>{''.join(f'<w:tc>{one}</w:tc>' for one in row)}</w:tr>" for row in cells)
    formula = (
        "<w:p><w:r><w:t>Energy </w:t></w:r><m:oMath><m:r><m:rPr/><m:t>E=m</m:t></m:r><m:sSup><m:e><m:r><m:t>c</m:t>"
        "</m:r></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup></m:oMath></w:p>"
    )
    body = paragraph("Bread", '<w:pPr><w:pStyle w:val="Heading1"/></w:pPr>') + paragraph("Flour and water.")
    [found] = reader.read(word(tmp_path / "a.docx", f"{body}<w:tbl>{table}</w:tbl>{formula}"))
    assert found.text == "# Bread\n\nFlour and water.\n\n| Name | Age |\n| --- | --- |\n|  | 31 |\n\nEnergy E=mc^2"
    assert (found.title, found.sections[0].path) == ("Bread", ("Bread",))


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


def test_pdf(tmp_path, texts):
    assert texts(write(tmp_path / "a.pdf", pdf(["A sentence that", "goes on."]))) == [
        ("", "", "A sentence that\ngoes on.")
    ]
    with pytest.raises(DataError, match="there is no text in it; are its pages pictures of text"):
        texts(write(tmp_path / "b.pdf", pdf([""])))


def test_readers_of_other_packages(tmp_path, monkeypatch, reader, texts):
    def broken(path):
        raise ValueError("odd")

    class PanicException(BaseException):  # what a library in Rust raises
        pass

    def panics(path):
        raise PanicException("index out of bounds")

    class Entry:
        def __init__(self, name, function):
            self.name, self.value, self._function = name, f"package:{name}", function

        def load(self):
            return self._function

    found = [
        Entry(".scan", lambda path: f"# {path.stem}\n\nRead."),
        Entry("odd", broken),
        Entry("five", lambda _: 5),
        Entry("rust", panics),
    ]
    found.append(Entry("pdf", lambda path: f"# {path.stem}\n\nRead from its pictures."))
    monkeypatch.setattr(metadata, "entry_points", lambda *, group: found if group == "gerund.readers" else [])
    document_reader.plugins.cache_clear()
    try:
        [one] = reader.read(write(tmp_path / "page.scan", "x"))
        assert one == ParsedText("# page\n\nRead.", "page", one.sections)
        with pytest.raises(DataError, match=r"the reader package:odd failed on it \(odd\)"):
            texts(write(tmp_path / "a.odd", "x"))
        with pytest.raises(DataError, match=r"the reader package:rust failed on it \(index out of bounds\)"):
            texts(write(tmp_path / "a.rust", "x"))
        with pytest.raises(DataError, match="is not a text but int"):
            texts(write(tmp_path / "a.five", "x"))
        assert [path.name for path in find_files([tmp_path])] == ["a.five", "a.odd", "a.rust", "page.scan"]
        # Another reader takes the place of one that is known here.
        assert texts(write(tmp_path / "own.pdf", pdf([""]))) == [("", "own", "# own\n\nRead from its pictures.")]
        assert document_reader.endings().count("pdf") == 1
    finally:
        document_reader.plugins.cache_clear()


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


GERMAN = "Grüße aus Köln: das Wetter ist schön, und die Bäume blühen."


@pytest.mark.parametrize("name", ["utf-8", "utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_a_byte_order_mark_counts_first(name):
    mark = "\ufeff".encode(name)
    raw = mark + GERMAN.encode(name)
    assert decoded(raw, "a.txt") == (GERMAN, "" if name == "utf-8" else f"{name} (byte order mark)")
    # A declaration in the text was written for another file.
    page = '<meta charset="iso-8859-1">' + GERMAN
    assert decoded(mark + page.encode(name), "a.html", markup=True)[0] == page


@pytest.mark.parametrize(
    ("head", "encoding", "named"),
    [
        ('<meta charset="windows-1252">', "cp1252", "windows-1252"),
        ("<META CHARSET=ISO-8859-1>", "latin-1", "windows-1252"),
        ("<meta http-equiv='Content-Type' content='text/html; charset=iso-8859-15'>", "iso8859-15", "iso8859-15"),
        ('<?xml version="1.0" encoding="windows-1252"?>', "cp1252", "windows-1252"),
        ("<?xml version='1.0' encoding='ISO-8859-1' ?>", "latin-1", "windows-1252"),
        ("<meta charset=us-ascii>", "cp1252", "windows-1252"),
        ("<!-- <meta charset=utf-8> --><meta charset=cp1252>", "cp1252", "windows-1252"),
    ],
)
def test_a_page_is_decoded_as_it_declares(head, encoding, named):
    page = f"{head}<p>{GERMAN}</p>"
    assert decoded(page.encode(encoding), "a.html", markup=True) == (page, f"{named} (declared)")


@pytest.mark.parametrize(
    ("declared", "encoding", "text"),
    [
        ("gb2312", "gbk", "今天天气很好"),
        ("shift_jis", "cp932", "日本語"),
        ("euc-kr", "cp949", "한국어"),
        # Names that browsers know and Python does not.
        ("Windows-31J", "cp932", "日本語①"),
        ("x-sjis", "cp932", "日本語"),
        ("x-euc-jp", "euc_jp", "日本語"),
        ("windows-949", "cp949", "똠방각하"),
        ("windows-874", "cp874", "ภาษาไทย"),
        ("ISO-8859-8-I", "iso8859-8", "שלום"),
        ("x-cp1251", "cp1251", "Привет"),
    ],
)
def test_asian_pages_are_decoded_as_they_declare(declared, encoding, text):
    page = f"<meta charset={declared}>{text}"
    assert decoded(page.encode(encoding), "a.html", markup=True)[0] == page


def test_what_is_declared_wrongly_is_not_taken():
    # Who can read the declaration byte by byte has no UTF-16 in front of him.
    assert decoded(b"<meta charset=utf-16>caf\xc3\xa9", "a.html", markup=True) == ("<meta charset=utf-16>café", "")
    assert decoded(b"<meta charset=no-such>caf\xc3\xa9", "a.html", markup=True)[1] == ""
    assert decoded(b"<meta charset=rot13>caf\xc3\xa9", "a.html", markup=True) == ("<meta charset=rot13>café", "")
    raw = b"<meta charset=utf-8>" + GERMAN.encode("cp1252")
    assert decoded(raw, "a.html", markup=True)[1] == "windows-1252 (detected)"
    # A codec that refuses everything.
    assert decoded(b"<meta charset=undefined>caf\xc3\xa9", "a.html", markup=True)[1] == ""
    # Bytes that windows-1252 has no character for.
    assert decoded(b"<meta charset=cp1252>a\x81\x93", "a.html", markup=True)[0].endswith("a\x81\u201c")
    # Plain text declares nothing.
    assert decoded(b"<meta charset=cp1252>caf\xc3\xa9", "a.txt")[1] == ""


@pytest.mark.parametrize(
    ("text", "encoding", "named"),
    [
        ("hello there", "utf-16-le", "utf-16-le"),
        ("hello there", "utf-16-be", "utf-16-be"),
        ("今天天气很好。\n第二行", "utf-16-le", "utf-16-le"),
        (GERMAN, "cp1252", "windows-1252"),
        ("Müller", "cp1252", "windows-1252"),
        ("Le café est très bon à l'été. « Où êtes-vous ? »", "latin-1", "windows-1252"),
        ("Привет, как дела? Сегодня хорошая погода.", "cp1251", "cp1251"),
        ("これは日本語のテキストです。文字コードを判定します。", "shift_jis", "cp932"),
    ],
)
def test_what_says_nothing_is_detected(text, encoding, named):
    assert decoded(text.encode(encoding), "a.txt") == (text, f"{named} (detected)")


def test_a_damaged_utf8_file_stays_one():
    raw = GERMAN.encode()
    assert decoded(raw[:4] + b"\xff" + raw[4:], "a.txt") == (
        GERMAN[:3] + "\ufffd" + GERMAN[3:],
        "utf-8 with errors (detected)",
    )
    cut = "日本語の".encode()[:-1]
    assert decoded(cut, "a.txt")[0].startswith("日本語")
    # A mark is no reason to be silent.
    assert decoded(codecs.BOM_UTF8 + cut, "a.txt") == ("日本語\ufffd", "utf-8 with errors (detected)")
    cut = GERMAN.encode("utf-16-le")[:-1]
    assert decoded(codecs.BOM_UTF16_LE + cut, "a.txt") == (GERMAN[:-1] + "\ufffd", "utf-16-le with errors (detected)")


def test_what_is_no_text_is_refused():
    with pytest.raises(DataError, match=r"a\.txt: it begins with the mark of utf-16-le, and is not valid"):
        decoded(b"\xff\xfe\xff", "a.txt")
    assert decoded(b"a\0b text " * 30, "a.txt") == ("a\0b text " * 30, "")
    with pytest.raises(DataError, match=r"a\.txt: not valid UTF-8 at byte 0, and its encoding cannot be detected"):
        decoded(bytes(range(128, 256)) * 20 + b"\0", "a.txt")


@pytest.mark.parametrize(
    "raw", ["hello".encode("utf-16-le"), codecs.BOM_UTF16_LE + "hello".encode("utf-16-le"), b"caf\xe9"]
)
def test_files_of_rows_are_utf8_and_errors_say_what_to_do(raw):
    # UTF-16 without a mark is valid UTF-8 where it is English, and would be taken as it is.
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: .*; convert it to UTF-8"):
        decode(raw, "a.jsonl, line 1")
