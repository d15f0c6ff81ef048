"""Write the page and report of `gerund demo`: ``demo.html`` with figures, and ``demo.json``."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from gerund.demo.steps import Demo, DemoResults
from gerund.errors import OutputExistsError, ResourceError
from gerund.inference.inspection import AttentionInspection
from gerund.jobs.files import write_atomic
from gerund.reporting.plots.attention import attention_figure
from gerund.reporting.plots.embeddings import embedding_maps
from gerund.reporting.plots.style import INK, headline, new_figure, picture
from gerund.reporting.rendering import Gallery, Picture, drawn, write_html
from gerund.settings.plan import AttentionPlan

PAGE = "demo.html"
REPORT = "demo.json"
SEARCHING, ATTENTION = "searching", "attention"

_PANEL_INCHES = 4.6


def make_folder(folder: Path) -> None:
    """Make the output folder, which may be there already."""
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} exists already and is not a folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(f"cannot make {folder}: {error.strerror or error}") from error


def report(demo: Demo, results: DemoResults) -> dict[str, Any]:
    """Put everything that the demo found into one JSON-ready dict."""
    lm = demo.lm
    return {
        "model": lm.name,
        "layers": lm.n_layers,
        "dimensions": lm.dimensions,
        "fingerprint": lm.fingerprint(),
        "searches": [
            {
                "query": query.text,
                "answer": query.answer.text,
                "ranks": {item.plan: item.ranks[number] for item in results.searches},
                "first": {item.plan: item.first[number] for item in results.searches},
            }
            for number, query in enumerate(demo.queries)
        ],
        "found_first": {item.plan: item.right for item in results.searches},
        "mean_place": {item.plan: round(item.place, 2) for item in results.searches},
        "written": [asdict(item) for item in results.written],
        "scorer": results.scorer,
        "likelihood_right": results.likely,
        "fitting": [{**asdict(item), "is_right": item.is_right} for item in results.fitting],
        "filled": [asdict(item) for item in results.filled],
        "missing": demo.missing,
        "verification": {**asdict(results.verification), "equal": results.verification.is_equal},
        "seconds": {step: round(value, 3) for step, value in demo.seconds.items()},
    }


def write_report(folder: Path, results: dict[str, Any]) -> Path:
    """Write what the demo found as JSON."""
    write_atomic(folder / REPORT, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return folder / REPORT


def write_page(folder: Path, demo: Demo, results: DemoResults, pictures: Gallery) -> Path:
    """Write the page that shows all of it."""
    lm = demo.lm
    groups = dict(pictures.groups())
    seconds = sum(demo.seconds.values())
    return write_html(
        folder / PAGE,
        "demo.html.jinja",
        title=f"{Path(lm.name).name}: one model, four models' work",
        kind=demo.kind,
        plan=demo.reads_as,
        queries=demo.queries,
        documents=len(demo.documents),
        results=results,
        fitting_right=sum(item.is_right for item in results.fitting),
        searching=groups.get(SEARCHING, []),
        attention=groups.get(ATTENTION, []),
        missing=[*demo.missing, *pictures.missing],
        seconds=[*((step, value, value / seconds) for step, value in demo.seconds.items()), ("together", seconds, 1.0)],
    )


def gallery(
    vectors: Mapping[str, np.ndarray],
    topics: Sequence[str],
    inspected: tuple[AttentionInspection, AttentionPlan] | None,
    plan_of_model: AttentionPlan,
) -> Gallery:
    """Draw everything; what cannot be drawn is a sentence."""
    # t-SNE is scikit-learn's, which the demo can do without.
    method = "tsne" if find_spec("sklearn") is not None else "pca"
    figures = [
        ("The map of the documents", lambda: _map(vectors, topics, method)),
        ("The picture of similarities", lambda: _similarities(vectors, topics)),
    ]
    if inspected is not None:
        figures.append(("The picture of attention", lambda: _attention(*inspected, plan_of_model)))
    return drawn(figures)


def _map(vectors: Mapping[str, np.ndarray], topics: Sequence[str], method: str) -> Picture:
    maps = {
        f"{when}: {plan}": vectors_ND
        for when, (plan, vectors_ND) in zip(("before", "after"), vectors.items(), strict=True)
    }
    figure = embedding_maps(maps, topics, title="The documents on a plane", method=method)
    return Picture(
        "A map of the documents",
        "Each point is a document, colored by a topic that the model never sees: encoded by the base model, and as "
        "the model encodes.",
        "Two scatter plots of the documents, coloured by topic, before and after the conversion.",
        picture(figure),
        SEARCHING,
    )


def _similarities(vectors: Mapping[str, np.ndarray], topics: Sequence[str]) -> Picture:
    figure = new_figure(_PANEL_INCHES * len(vectors), _PANEL_INCHES)
    headline(figure, "How alike every two documents are")
    for axes, (plan, vectors_ND) in zip(
        figure.subplots(1, len(vectors), squeeze=False)[0], vectors.items(), strict=True
    ):
        _draw_similarities(axes, plan, topics, vectors_ND)
    return Picture(
        "Similarities",
        "Cosines of every two documents, sorted by topic. Bright squares on the diagonal are topics that were told "
        "apart.",
        "Two matrices of cosines, before and after the conversion.",
        picture(figure),
        SEARCHING,
    )


def _draw_similarities(axes: Any, plan: str, topics: Sequence[str], vectors: np.ndarray) -> None:
    unit_ND = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosine_NN = unit_ND @ unit_ND.T
    low, high = np.percentile(cosine_NN[~np.eye(len(cosine_NN), dtype=bool)], [2, 98])
    image = axes.imshow(cosine_NN, vmin=low, vmax=high, cmap="viridis", interpolation="nearest")
    starts = [place for place, topic in enumerate(topics) if place == 0 or topics[place - 1] != topic]
    middles = [(a + b - 1) / 2 for a, b in zip(starts, [*starts[1:], len(topics)], strict=True)]
    names = [topics[start] for start in starts]
    axes.set_xticks(middles, names, rotation=40, ha="right", fontsize=8)
    axes.set_yticks(middles, names, fontsize=8)
    for start in starts[1:]:
        axes.axhline(start - 0.5, color="white", linewidth=0.8)
        axes.axvline(start - 0.5, color="white", linewidth=0.8)
    axes.set_title(plan, fontsize=9, color=INK)
    axes.figure.colorbar(image, ax=axes, shrink=0.8).ax.tick_params(labelsize=7)


def _attention(inspected: AttentionInspection, plan: AttentionPlan, model_plan: AttentionPlan) -> Picture:
    title = f"Attention, base model and under {plan.name}; mean of {len(inspected.ids)} sentences"
    figure = attention_figure(inspected.before, inspected.after, title=title, even=inspected.even)
    return Picture(
        "Attention",
        f"Above, how much each token attends to each other one: in the base model, with the sink at the first token, "
        f"and under {plan.name}{_aside(plan, model_plan)}. Below, the fraction of attention that the first "
        "token takes in each layer.",
        "Attention maps of the layers before and after, and the fraction that the first token takes.",
        picture(figure),
        ATTENTION,
    )


def _aside(plan: AttentionPlan, model_plan: AttentionPlan) -> str:
    """Say what hides the sink, and whether this model is encoded so."""
    if not plan.name.startswith("mask0"):
        return ""
    if model_plan.name == plan.name:
        return ", which hides it"
    return f", which hides it; {model_plan.name}, the plan elsewhere on this page, leaves the sink where it is"
