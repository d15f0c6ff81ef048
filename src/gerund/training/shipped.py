"""The recipes that come inside the package, and where a recipe's name leads.

Knows: names, files, the comment that a recipe begins with. Does not know: what a recipe may set.
"""

import difflib
import re
from pathlib import Path

from gerund.errors import ConfigError

_FOLDER = Path(__file__).parent.parent / "assets" / "recipes"


def shipped_recipes() -> dict[str, str]:
    """Return the recipes inside by name, each with what it says of itself in one sentence.

    >>> shipped_recipes()["magnet-default"]
    'MAGNET on the embedded default model: an adapter that fills in missing spans and reads tokens both ways.'
    """
    paths = sorted(_FOLDER.glob("*.yaml"), key=lambda path: path.stem)
    return {path.stem: _first_sentence(path.read_text("utf-8")) for path in paths}


def find_recipe(recipe: str | Path) -> Path:
    """Return the file of a recipe: a path, or the name of one that comes inside.

    Raises:
        ConfigError: There is neither such a file nor such a name.
    """
    path, inside = Path(recipe), _FOLDER / f"{recipe}.yaml"
    if path.is_file() or path.name != str(recipe) or path.suffix in (".yaml", ".yml"):
        # A path that leads nowhere is refused where the file is read.
        return path
    if inside.is_file():
        return inside
    names = [file.stem for file in sorted(_FOLDER.glob("*.yaml"))]
    close = difflib.get_close_matches(str(recipe), names, n=3)
    hint = f"did you mean {' or '.join(close)}?" if close else "`gerund recipes` lists those inside"
    raise ConfigError(f"{recipe}: no such recipe, neither a file nor one of those inside; {hint}")


def made_by(model: str | Path) -> str:
    """Return what makes a model that is not there, as the end of a sentence; empty where no recipe inside does.

    >>> made_by("runs/default-base/model")
    '; `gerund train default-base output=runs/default-base` makes it'
    """
    run = Path(model).parent
    return f"; `gerund train {run.name} output={run}` makes it" if run.name in shipped_recipes() else ""


def _first_sentence(text: str) -> str:
    lines = []
    for line in text.split("\n"):
        if not line.removeprefix("#").strip() or not line.startswith("#"):
            break
        lines.append(line.removeprefix("#").strip())
    whole = " ".join(lines)
    # The full stop of "et al. 2024" ends no sentence.
    return re.split(r"(?<=\.) (?=[A-Z])", whole)[0]
