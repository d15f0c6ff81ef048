"""The documentation as a site: what is generated, where links lead, and one site a version beside the other."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gerund.training.recipe import Recipe
from tests.test_docs import DOCS, ROOT, commands, read

GENERATED = re.compile(r"^<!-- generated: (?P<what>[a-z ]+) -->$", re.MULTILINE)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Return the module that builds the site."""
    pytest.importorskip("mkdocs")
    monkeypatch.syspath_prepend(str(DOCS / "_site"))
    yield importlib.import_module("hooks")
    for name in ("hooks", "docstrings", "recipe_fields"):
        sys.modules.pop(name, None)


def test_docstrings_become_markdown(hooks) -> None:
    made = importlib.import_module("docstrings").as_markdown("Add, as :func:`sum`.\n\n>>> 1 + 1\n2\n\nMore.")
    assert made == "Add, as `sum`.\n\n```pycon\n>>> 1 + 1\n2\n```\n\nMore."


def test_what_the_site_generates_is_there(hooks) -> None:
    wanted = {match["what"] for page in DOCS.rglob("*.md") for match in GENERATED.finditer(read(page))}
    assert wanted == set(hooks.GENERATORS)
    reference = hooks.GENERATORS["commands"]()
    options = [f"{name} {option}" for name, all_of in commands().items() for option in all_of if option[0] == "-"]
    missing = [name for name in commands() if f"## {name}\n" not in reference]
    parts = {part.split("\n")[0]: part for part in reference.split("## ")}
    missing += [text for text in options if f"`{text.split()[1]}`" not in parts[text.split()[0]]]
    assert not missing


def test_every_setting_of_a_recipe_is_in_the_reference(hooks) -> None:
    recipe, objectives = hooks.GENERATORS["recipe"](), hooks.GENERATORS["objectives"]()
    missing = [name for name in Recipe.model_fields if f"| `{name}` |" not in recipe]
    guide = read(DOCS / "reference" / "recipes.md")
    kinds = re.findall(r"^\| `(\w+)` \|", guide, re.MULTILINE)
    assert len(kinds) >= 10
    missing += [kind for kind in kinds if f"\n## {kind}\n" not in objectives]
    missing += [kind for kind in re.findall(r"^## (\w+)$", objectives, re.MULTILINE) if kind not in kinds]
    assert not missing
    assert "| `p_mar` | number | `0.5` |" in objectives


def test_links_are_led_to_where_pages_lie_in_the_site(hooks) -> None:
    pages = ["index.md", "contributing.md", "tutorial/index.md", "how-to/a.md", "pictures/x.png"]
    text = (
        "[a](docs/how-to/a.md#b) ![x](docs/pictures/x.png) [c](CONTRIBUTING.md) [l](LICENSE) [w](https://example.com)"
    )
    want = "[a](how-to/a.md#b) ![x](pictures/x.png) [c](contributing.md) l (`LICENSE`) [w](https://example.com)"
    assert hooks.rewritten(text, "index.md", pages) == want
    deep = "[c](../../CONTRIBUTING.md) [`examples/x.py`](../../examples/x.py) [t](../tutorial/index.md)"
    want = "[c](../contributing.md) `examples/x.py` [t](../tutorial/index.md)"
    assert hooks.rewritten(deep, "how-to/a.md", pages) == want
    fenced = "```text plan bidir 4\n[a](b.md)\n```\n"
    assert hooks.rewritten(fenced, "how-to/a.md", pages) == fenced.replace(" plan bidir 4", "")


@pytest.mark.full  # `make docs`, which make check runs, builds one
def test_sites_of_two_versions_lie_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("mike")
    if not (ROOT / ".git").exists():
        pytest.skip("the site's versions are kept by git, and this is no checkout")
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", str(checkout)], check=True)
    names = {"GIT_AUTHOR_NAME": "tests", "GIT_COMMITTER_NAME": "tests", "EMAIL": "tests@localhost"}
    paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for version in ("1.0.0", "1.1.0"):
        deploy = ["mike", "deploy", "--update-aliases", "--alias-type", "copy"]
        subprocess.run(
            [*deploy, version, "latest"], cwd=checkout, check=True, env={**os.environ, **names, "PATH": paths}
        )
    shown = subprocess.run(
        ["git", "show", "gh-pages:versions.json"], cwd=checkout, check=True, capture_output=True, text=True
    )
    assert [(one["version"], one["aliases"]) for one in json.loads(shown.stdout)] == [
        ("1.1.0", ["latest"]),
        ("1.0.0", []),
    ]
    page = subprocess.run(
        ["git", "show", "gh-pages:1.0.0/index.html"], cwd=checkout, check=True, capture_output=True, text=True
    )
    assert "mike" in page.stdout  # the menu of versions reads versions.json
