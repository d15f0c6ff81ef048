"""What the demo leaves in its folder: ``demo.html`` to look at, ``demo.json`` to read.

Knows: what the demo found. Does not know: models, the command line.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gerund.demo.findings import Findings
from gerund.demo.pictures import LOOKING, SEARCHING
from gerund.demo.steps import HITS, Demo
from gerund.errors import OutputExistsError, ResourceError
from gerund.jobs.files import write_whole
from gerund.pages.rendering import Gallery, write_html

PAGE = "demo.html"
REPORT = "demo.json"


def make_folder(folder: Path) -> None:
    """Make the output folder, which may be there already.

    Raises:
        OutputExistsError: there is a file of that name.
        ResourceError: it cannot be made.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} exists already and is not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot make {folder}: {error.strerror or error}") from error


def report(demo: Demo, findings: Findings) -> dict[str, Any]:
    """Put everything that the demo found into one JSON-ready dict."""
    lm = demo.lm
    plans = (findings.baseline, findings.found)
    return {
        "model": lm.name,
        "layers": lm.n_layers,
        "dimensions": lm.dimensions,
        "fingerprint": lm.fingerprint(),
        "searches": [
            {"query": query.text, "topic": query.topic, "answers": [asdict(hit) for hit in hits]}
            for query, hits in zip(demo.queries, findings.found.answers, strict=True)
        ],
        "right": {item.plan: item.right for item in plans},
        "right_neighbours": {item.plan: item.neighbours for item in plans},
        "written": [asdict(item) for item in findings.written],
        "scorer": findings.scorer,
        "fitting": [{**asdict(item), "is_right": item.is_right} for item in findings.fitting],
        "filled": [asdict(item) for item in findings.filled],
        "missing": demo.missing,
        "proof": {**asdict(findings.proof), "equal": findings.proof.is_equal},
        "seconds": {step: round(value, 3) for step, value in demo.seconds.items()},
    }


def write_report(folder: Path, found: dict[str, Any]) -> Path:
    """Write what the demo found as JSON.

    Raises:
        ResourceError: the disk is full or refuses.
    """
    write_whole(folder / REPORT, json.dumps(found, indent=2, ensure_ascii=False) + "\n")
    return folder / REPORT


def write_page(folder: Path, demo: Demo, findings: Findings, pictures: Gallery) -> Path:
    """Write the page that shows all of it.

    Raises:
        ResourceError: the disk is full or refuses.
    """
    lm = demo.lm
    groups = dict(pictures.groups())
    seconds = sum(demo.seconds.values())
    return write_html(
        folder / PAGE,
        "gerund.demo",
        "demo.html.jinja",
        title=f"{Path(lm.name).name}: one model, four models' work",
        kind=demo.kind,
        plan=lm.encoder.attention.name,
        searches=list(zip(demo.queries, findings.found.answers, strict=True)),
        documents=len(demo.documents),
        topics=len(set(demo.topics)),
        nearest=HITS,
        chance=demo.chance,
        findings=findings,
        searching=groups.get(SEARCHING, []),
        looking=groups.get(LOOKING, []),
        missing=[*demo.missing, *pictures.missing],
        seconds=[*((step, value, value / seconds) for step, value in demo.seconds.items()), ("together", seconds, 1.0)],
    )
