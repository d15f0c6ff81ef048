"""Takes the pictures of the documentation from a page that `gerund demo` wrote.

    gerund demo -o demo-output
    python docs/_site/pictures.py demo-output/demo.html

Knows: which picture of the demo is which file. Does not know: how they are drawn.
"""

import base64
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "pictures"
# By the beginning of the picture's alternative text.
PICTURES = {"Two scatter plots": "document-map.png", "Attention maps": "attention.png"}
IMAGE = re.compile(r"<img\b[^>]*>")
DATA = re.compile(r'src="data:image/png;base64,(?P<data>[^"]+)"')


def main(page: Path) -> None:
    """Write each of the pictures into its file.

    Args:
        page: the demo's page.
    """
    images = IMAGE.findall(page.read_text(encoding="utf-8"))
    for beginning, name in PICTURES.items():
        [image] = [image for image in images if f'alt="{beginning}' in image]
        (FOLDER / name).write_bytes(base64.b64decode(DATA.search(image)["data"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
