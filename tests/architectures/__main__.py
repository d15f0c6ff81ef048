"""`python -m tests.architectures [--transformers FOLDER] [ARCHITECTURE ...]`: writes docs/models.md.

With another installation, or with some architectures only, the page stays as it is, and what differs from it, or what
is found, is printed.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "GERUND_TRANSFORMERS"


def main() -> int:
    """Survey, and write or compare."""
    parser = argparse.ArgumentParser(prog="python -m tests.architectures", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="ARCHITECTURE", help="survey these only, and print what is found")
    parser.add_argument("--transformers", type=Path, default=os.environ.get(VARIABLE), metavar="FOLDER",
                        help=f"the folder that holds another transformers package; or set {VARIABLE}")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print what is found, a line each, and write nothing")
    given = parser.parse_args()
    if given.transformers is not None:
        return _elsewhere(Path(given.transformers).resolve(), given.kinds)
    import torch
    from transformers.utils import logging

    from tests.architectures.configs import KINDS
    from tests.architectures.page import PAGE, page
    from tests.architectures.survey import survey

    torch.set_num_threads(1)
    logging.set_verbosity_error()
    found = []
    for kind in given.kinds or KINDS:
        found.append(survey(kind))
        line = (
            json.dumps(found[-1].to_dict()) if given.json else f"{kind}: {found[-1].verdict} {found[-1].why}".rstrip()
        )
        print(line, flush=True)
    if not given.kinds and not given.json:
        PAGE.write_text(page(found), encoding="utf-8")
    return int(any(one.verdict == "wrong" for one in found))


def _elsewhere(folder: Path, kinds: list[str]) -> int:
    """Survey with another transformers, in a process of its own, and print what differs from the page."""
    if not (folder / "transformers" / "__init__.py").is_file():
        print(f"{folder} holds no package transformers", file=sys.stderr)
        return 2
    path = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    environment.pop(VARIABLE, None)
    command = [sys.executable, "-m", "tests.architectures", "--json", *kinds]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    from tests.architectures.page import _TITLES, PAGE, sections

    known = {kind: title for title, kinds in sections(PAGE.read_text(encoding="utf-8")).items() for kind in kinds}
    for line in done.stdout.splitlines():
        if not line.startswith("{"):  # some architectures print what they warn of
            print(line, file=sys.stderr)
            continue
        one = json.loads(line)
        title = _TITLES.get(one["verdict"], "")
        before = known.get(one["kind"], "not there")
        if before != title:
            print(f"{one['kind']}: {one['verdict']} (before: {before}) {one['why']}".rstrip())
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
