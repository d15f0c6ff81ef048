"""Takes the pictures of the documentation from a page that `gerund demo` wrote, or that `gerund serve` shows.

    gerund demo -o demo-output
    python docs/_site/pictures.py demo-output/demo.html

    gerund serve --port 8000 &
    python docs/_site/pictures.py http://127.0.0.1:8000

Knows: which picture of which page is which file. Does not know: how they are drawn.
"""

import base64
import re
import shutil
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
# By the beginning of the picture's alternative text.
PICTURES = {"Two scatter plots": "document-map.png", "Attention maps": "attention.png"}
IMAGE = re.compile(r"<img\b[^>]*>")
DATA = re.compile(r'src="data:image/png;base64,(?P<data>[^"]+)"')


def of_demo(page: Path) -> None:
    """Write each of the pictures of a demo's page into its file."""
    images = IMAGE.findall(page.read_text(encoding="utf-8"))
    for beginning, name in PICTURES.items():
        [image] = [image for image in images if f'alt="{beginning}' in image]
        (FOLDER / name).write_bytes(base64.b64decode(DATA.search(image)["data"]))


def of_server(address: str) -> None:
    """Have the page of a server draw a sentence, at a layer in the middle, and photograph it."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as running:
        browser = running.chromium.launch(executable_path=shutil.which("chromium"))
        page = browser.new_page(viewport={"width": 1200, "height": 980})
        page.goto(address)
        page.wait_for_selector("body[data-ready]")
        page.click("#tab-attention")
        page.fill("#attention-text", "The old man looked at the sea and went home.")
        page.press("#attention-text", "Enter")
        page.wait_for_selector("#maps:not([hidden])")
        for _ in range(4):
            page.press("#attention [name=layer]", "ArrowRight")
        page.screenshot(path=FOLDER / "page-attention.png")
        browser.close()


def main(place: str) -> None:
    """Write the pictures that a page has into their files."""
    if place.startswith("http"):
        of_server(place)
    else:
        of_demo(Path(place))


if __name__ == "__main__":
    main(sys.argv[1])
