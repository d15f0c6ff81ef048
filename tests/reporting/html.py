"""What is expected of every page."""

import re
from html.parser import HTMLParser

VOID = {"meta", "img", "br", "wbr", "hr", "input"}


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in turn, ids are unique."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = text
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open, f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(set(names)) == len(names), f"an attribute twice: {tag} {names}"
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("style", "script"):
            return
        self.words.append(data)
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        """All that is to be read, white space folded."""
        return " ".join(" ".join(self.words).split())

    @property
    def table(self) -> list[list[str]]:
        """All rows of all tables, white space folded."""
        return [[" ".join(cell.split()) for cell in row] for row in self.rows]

    def having(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of every element of a name."""
        return [attributes for name, attributes in self.elements if name == tag]


def checked(text: str) -> Page:
    """Read a page and check what holds for all: well-formed, alone, accessible."""
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    # Alone: nothing is fetched.
    assert not re.search(r"https?:|@import|//cdn|\burl\(", text)
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.elements}
    assert all("src" not in script for script in page.having("script"))
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.having("img"))
    policy = next(meta for meta in page.having("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'; img-src data:;")
    # Nothing of a template is left, and no handler came in with the data.
    assert not re.search(r"\{[%#]", text)
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    # Accessible.
    assert page.having("html") == [{"lang": "en"}]
    assert all(image["alt"] for image in page.having("img"))
    assert all(head.get("scope") for head in page.having("th"))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(set(ids)) == len(ids)
    targets = [anchor["href"] for anchor in page.having("a")]
    assert all(target.startswith("#") and target[1:] in ids for target in targets)
    for _, attributes in page.elements:
        if attributes.get("tabindex") == "0":
            assert attributes.get("role") == "region"
            assert attributes.get("aria-label")
    return page
