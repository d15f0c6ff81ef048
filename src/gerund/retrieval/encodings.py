"""Decode the bytes of a document by its byte order mark, its declared encoding, as UTF-8, or by detection."""

import codecs
import re

from gerund.errors import DataError, MissingDependencyError

# UTF-32 first: its mark begins with that of UTF-16.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
# Browsers look this far for a declaration.
_HEAD = 1024
_XML = re.compile(rb"""\s*<\?xml\b[^>]{0,200}?\bencoding\s{0,20}=\s{0,20}["']([\w.:-]{1,40})["']""", re.IGNORECASE)
_META = re.compile(rb"""<meta\b[^>]{0,400}?\bcharset\s{0,20}=\s{0,20}["']?\s{0,20}([\w.:-]{1,40})""", re.IGNORECASE)
_COMMENT = re.compile(rb"<!--.*?(?:-->|\Z)", re.DOTALL)
# As in browsers (WHATWG Encoding): a declared name stands for this larger set, which editors write.
_MEANT = {
    "iso8859-1": "windows-1252",
    "ascii": "windows-1252",
    "cp1252": "windows-1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "gb2312": "gb18030",
    "gbk": "gb18030",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
}
# Names that Python does not know, and affixes of names that it knows: x-sjis, iso-8859-8-i.
_LABELS = {
    "windows-31j": "cp932", "windows-949": "cp949", "windows-874": "cp874", "ksc_5601": "cp949",
    "cn-big5": "big5hkscs", "gb_2312-80": "gb18030",
}  # fmt: skip
_ADDED = re.compile(r"^(?:x-)+|-[ie]$")
# Encodings of text files in practice. Detection among all of Python's would mistake common ones for rare ones.
_WESTERN = "cp1252"
_ONE_BYTE_UNITS = (
    _WESTERN, "cp1250", "cp1251", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp874", "koi8_r",
    "koi8_u", "iso8859_2", "mac_roman", "gb18030", "big5", "cp932", "euc_jp", "iso2022_jp", "cp949",
)  # fmt: skip
_WIDE_UNITS = ("utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be")


def utf8_or_none(raw: bytes) -> str | None:
    """Return bytes as text if they are valid UTF-8 without the zero bytes that UTF-16 is full of."""
    if b"\0" in raw:
        return None
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError:
        return None


def decoded(raw: bytes, where: str, *, markup: bool = False) -> tuple[str, str]:
    r"""Return bytes as text, and their encoding; "" for UTF-8. ``markup`` (HTML, XML) can declare its encoding.

    A byte order mark counts first, then the declaration, then UTF-8; otherwise the encoding is detected.

    >>> decoded("caf\u00e9".encode("utf-16"), "a.txt")
    ('café', 'utf-16-le (byte order mark)')
    >>> decoded(b'<meta charset="iso-8859-1">caf\xe9', "a.html", markup=True)[1]
    'windows-1252 (declared)'
    """
    for mark, name in _MARKS:
        if raw.startswith(mark):
            return _marked(raw[len(mark) :], name, where)
    name = _declared(raw[:_HEAD]) if markup else ""
    if name and name != "utf-8":
        text = _strictly(raw, name)
        if text is not None:
            return text, f"{name} (declared)"
    plain = utf8_or_none(raw)
    if plain is not None:
        return plain, ""
    return _detected(raw, where)


def _marked(raw: bytes, name: str, where: str) -> tuple[str, str]:
    """Return bytes after a byte order mark as text, which may be slightly damaged, or cut in a character."""
    try:
        return raw.decode(name), "" if name == "utf-8" else f"{name} (byte order mark)"
    except UnicodeDecodeError as error:
        text = raw.decode(name, "replace")
        if text.count("\ufffd") * 2 > len(text):
            raise DataError(
                f"{where}: it begins with the mark of {name}, and is not valid {name}; save it as UTF-8"
            ) from error
        return text, f"{name} with errors (detected)"


def _declared(head: bytes) -> str:
    """Return the encoding of an XML declaration or a meta element; "" for none, or an unknown one."""
    match = _XML.match(head) or _META.search(_COMMENT.sub(b"", head))
    if match is None:
        return ""
    label = _ADDED.sub("", match[1].decode("ascii", "replace").lower())
    try:
        name = codecs.lookup(_LABELS.get(label, label)).name
    except LookupError:
        return ""
    # A declaration that is readable byte by byte is not in UTF-16.
    return "utf-8" if name.startswith(("utf-16", "utf-32")) else _MEANT.get(name, name)


def _strictly(raw: bytes, name: str) -> str | None:
    try:
        text = raw.decode(name)
    except (UnicodeError, LookupError):
        if name != "windows-1252":
            return None
        # Five bytes are undefined there, and browsers pass them through.
        text = "".join(_western(piece) for piece in re.split(rb"([\x81\x8d\x8f\x90\x9d]+)", raw))
    return text if isinstance(text, str) else None  # rot13 is a codec too


def _western(piece: bytes) -> str:
    try:
        return piece.decode("windows-1252")
    except UnicodeDecodeError:
        return piece.decode("latin-1")


def _detected(raw: bytes, where: str) -> tuple[str, str]:
    if b"\0" not in raw:
        # A damaged UTF-8 file has more valid characters than errors; in other encodings they are valid by chance.
        text = raw.decode("utf-8", "replace")
        damaged = text.count("\ufffd")
        if sum(1 for character in text if character > "\x7f") > 2 * damaged:
            return text, "utf-8 with errors (detected)"
    try:
        from charset_normalizer import from_bytes
    except ImportError as error:
        raise MissingDependencyError(
            f"{where}: not valid UTF-8, and needs charset-normalizer to detect what it is: "
            "pip install 'gerund[documents]'"
        ) from error
    wide = b"\0" in raw
    matches = list(from_bytes(raw, cp_isolation=list(_WIDE_UNITS if wide else _ONE_BYTE_UNITS)))
    if not matches:
        try:
            return raw.decode("utf-8"), ""  # UTF-8 with some zero bytes
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: not valid UTF-8 at byte {error.start}, and its encoding cannot be detected; save it as UTF-8"
            ) from error
    best = matches[0]
    name = best.encoding
    # For short texts many encodings fit equally well; then the most common one is most likely.
    if any(_WESTERN in match.could_be_from_charset for match in matches if match.chaos <= best.chaos):
        name = _WESTERN
    name = {"cp1252": "windows-1252"}.get(name, name.replace("_", "-"))
    strict = _strictly(raw, name)
    return str(best) if strict is None else strict, f"{name} (detected)"
