"""Encodings: what a file's mark says, what it declares, and what is detected."""

import codecs

import pytest

from gerund.data.files import decode
from gerund.errors import DataError
from gerund.retrieval.formats import decoded

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
