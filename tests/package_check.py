"""Builds the packages of a release and installs one into an empty environment: `python -m tests.package_check FOLDER`.

The wheel is made from the source package, so what is missing there is missed. Nothing of the checkout is on the path
of what runs afterwards. With `--here` the wheel is tried with the libraries of this environment: in half a minute,
without the network, and without what only an empty environment shows.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# Extras that are for developers; every other one has to resolve.
FOR_DEVELOPERS = {"dev", "docs"}
# The oldest and the newest Python; what is asked for on the other than the running one has to have wheels.
PYTHONS = ("3.11", "3.13")
WITHOUT_WHEELS = {"lm-eval"}  # rouge-score, which it needs
IN_SOURCES = ("tests/tiny.py", "constraints.txt", "Makefile", "CITATION.cff", "SECURITY.md", "LICENSE")
TYPED = """
import gerund
lm: gerund.LanguageModel = gerund.load()
vectors = lm.encode(["a text"])
reveal_type(lm.generate("The old man", 3)[0].text)
"""


def run(*command: str | Path, folder: Path | None = None, path: Path | None = None) -> str:
    """Run a command to its end, and return what it wrote; ``path`` is where Python looks for packages first."""
    env = None if path is None else {**os.environ, "PYTHONPATH": str(path)}
    parts = [str(part) for part in command]
    done = subprocess.run(parts, cwd=folder, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        said = " ".join(str(part) for part in command)
        sys.exit(f"{said}\nfailed with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def build(folder: Path) -> tuple[Path, Path]:
    """Build the source package, and from it the wheel."""
    for old in folder.glob("gerund-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    [sources], [wheel] = folder.glob("gerund-*.tar.gz"), folder.glob("gerund-*.whl")
    return sources, wheel


def missing(sources: Path, wheel: Path) -> list[str]:
    """Return what the packages lack."""
    with tarfile.open(sources) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        installed = set(archive.namelist())
    tracked = run("git", "ls-files", "src/gerund", folder=ROOT).split() if (ROOT / ".git").exists() else []
    lacking = [f"{sources.name}: {name}" for name in (*tracked, *IN_SOURCES) if name not in held]
    lacking += [f"{wheel.name}: {name}" for name in tracked if name.removeprefix("src/") not in installed]
    foreign = [name for name in installed if not name.startswith(("gerund/", "gerund-"))]
    return lacking + [f"{wheel.name} holds {name}, which is none of its business" for name in foreign]


def extras() -> list[str]:
    """Return what a user may ask for beside the package."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return sorted(set(project["optional-dependencies"]) - FOR_DEVELOPERS)


def try_out(python: Path, folder: Path, path: Path | None = None) -> None:
    """Use what was installed, away from the checkout."""
    (folder / "texts.txt").write_text("The old man looked at the sea.\nA ship came home.\n", encoding="utf-8")
    command = (python.parent / "gerund",) if path is None else (python, "-m", "gerund")
    version = run(*command, "--version", folder=folder, path=path)
    filling = ("infill", "The old man looked at [blank] and went home.", "--length", "1")  # the model and an adapter
    others = (
        ("generate", "The old man", "--max-new-tokens", "4"),
        ("embed", "texts.txt", "-o", "vectors.parquet"),
        ("recipes",),
    )
    for arguments in (filling, *(others if path is None else ())):
        run(*command, *arguments, folder=folder, path=path)
    where = run(python, "-c", "import gerund; print(gerund.__file__)", folder=folder, path=path)
    if str(ROOT / "src") in where:
        sys.exit(f"the checkout was used: {where}")
    print(f"gerund {version.strip()}: installed, filled a gap" + (", wrote, read" if path is None else ""))


def try_types(python: Path, folder: Path) -> None:
    """Check a program that uses what was installed."""
    (folder / "typed.py").write_text(TYPED, encoding="utf-8")
    mypy = (sys.executable, "-m", "mypy", "--python-executable", python, "--strict", "--follow-imports", "silent")
    told = run(*mypy, folder / "typed.py", folder=folder)
    if 'Revealed type is "str"' not in told and 'Revealed type is "builtins.str"' not in told:
        sys.exit(f"the package gives no types to those who use it:\n{told}")
    print("gave its types")


def main(arguments: Sequence[str]) -> None:
    """Build, look, install, try."""
    folder = Path(arguments[0]).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    sources, wheel = build(folder)
    if lacking := missing(sources, wheel):
        sys.exit("\n".join(lacking))
    print(f"{sources.name} and {wheel.name} ({wheel.stat().st_size / 2**20:.1f} MiB)")
    with tempfile.TemporaryDirectory() as name:
        own = Path(name)
        (own / "work").mkdir()
        if "--here" in arguments:
            pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps")
            run(*pip, "--target", own / "installed", wheel)
            try_out(Path(sys.executable), own / "work", own / "installed")
            return
        venv.create(own / "environment", with_pip=True)
        python = own / "environment" / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", CONSTRAINTS)
        run(*pip, wheel)
        here = f"{sys.version_info.major}.{sys.version_info.minor}"
        for version in dict.fromkeys((here, *PYTHONS)):
            elsewhere = version != here
            asked = [one for one in extras() if not (elsewhere and one in WITHOUT_WHEELS)]
            how = ("--python-version", version, "--only-binary", ":all:", "--target", own) if elsewhere else ()
            run(*pip, "--dry-run", *how, f"gerund[{','.join(asked)}] @ {wheel.as_uri()}")
            print(f"Python {version}: {len(asked)} extras can be installed together")
        try_out(python, own / "work")
        try_types(python, own / "work")


if __name__ == "__main__":
    main(sys.argv[1:])
