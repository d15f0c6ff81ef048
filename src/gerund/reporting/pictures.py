"""Choose and draw the figures of an evaluation report."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, TypeVar

from gerund.errors import DataError
from gerund.evaluation.data_files import LabelledTexts, RatedPairs
from gerund.evaluation.systems.base import Encoder, System
from gerund.evaluation.systems.language_model import LanguageModelSystem
from gerund.evaluation.systems.selection import label_of
from gerund.evaluation.task import EvaluationConfig, Task
from gerund.reporting.comparison import PERCENTS, Column, Comparison, Row, Section
from gerund.reporting.rendering import Gallery, Picture, Wanted, bare_name, drawn

if TYPE_CHECKING:
    from gerund.reporting.plots.scores import ScorePanel

# The metric of generation that can be compared across tokenizers.
_BITS = "bits_per_byte"
# Panels of one picture, and pictures of one kind.
_MOST_PANELS = 4
_MOST_MAPS, _MOST_HISTOGRAMS, _MOST_PLANS = 3, 4, 6
# t-SNE of more takes longer than many a task.
_MOST_POINTS = 1000

SUMMARY = "Summary"
"""The group whose first figure is next to the summary."""

AnyData = TypeVar("AnyData", LabelledTexts, RatedPairs)


def pictures_for(
    comparison: Comparison, systems: Sequence[System], tasks: Sequence[Task], config: EvaluationConfig
) -> Gallery:
    """Draw what shows more than the table does.

    A picture that cannot be drawn is missing with a sentence that says why: what was measured must not be lost to it.
    """
    models = [system for system in systems if isinstance(system, Encoder)]
    return drawn(_wanted(comparison, models, tasks, config))


def _wanted(
    comparison: Comparison, models: Sequence[Encoder], tasks: Sequence[Task], config: EvaluationConfig
) -> Iterator[Wanted]:
    yield from _trade(comparison)
    for section in comparison.sections:
        yield f"The bars of {section.side}", partial(_bars_of, section, comparison)
    if models:
        shown = models[:_MOST_PANELS]
        yield from _maps(shown, tasks, config)
        yield from _histograms(shown, tasks, config)
        yield from _attention([system for system in models if isinstance(system, LanguageModelSystem)])


def _trade(comparison: Comparison) -> Iterator[Wanted]:
    """Yield one side against the other where at least two systems were measured on both."""
    sides = {section.side: section for section in comparison.sections}
    if "representation" not in sides or "generation" not in sides:
        return
    group = next((group for group in sides["generation"].groups if group.metric == _BITS), None)
    reads, writes = sides["representation"].mean, None if group is None else group.mean
    if reads is None or writes is None:
        return
    places = zip(comparison.columns, reads.values, writes.values, strict=True)
    points = [(column, read, write) for column, read, write in places if read is not None and write is not None]
    if len(points) > 1:
        yield "The trade-off", partial(_trade_of, points, reads.label, writes.label)


def _trade_of(placed: Sequence[tuple[Column, float, float]], reads: str, writes: str) -> Picture:
    from gerund.reporting.plots.scores import TradePoint, trade_off
    from gerund.reporting.plots.style import picture

    points = [
        TradePoint(column.label, read, write, bare_name(str(column.description["model"])))
        for column, read, write in placed
    ]
    figure = trade_off(points, title="Both sides of the trade", ylabel=f"representation, {reads}")
    return Picture(
        "Both sides of the trade",
        f"Upwards: representation, {reads}. To the left: generation, bits per byte, {writes}. Plans of one model "
        "generate the same text and are above each other.",
        "Scatter of representation against bits per byte: "
        + "; ".join(f"{column.label} {100 * read:.2f} and {write:.3f}" for column, read, write in placed),
        picture(figure),
        SUMMARY,
    )


def _bars_of(section: Section, comparison: Comparison) -> Picture:
    from gerund.reporting.plots.scores import score_bars
    from gerund.reporting.plots.style import picture

    panels = [_panel(group.kind, row, comparison) for group in section.groups for row in group.rows]
    return Picture(
        section.side.capitalize(),
        "One panel a task, each on a scale of its own; one bar a system, whiskers one standard deviation over runs.",
        f"Bars of every score of the side {section.side}; the same numbers stand in the table.",
        picture(score_bars(panels, title=section.side.capitalize())),
        "Scores task by task",
    )


def _panel(kind: str, row: Row, comparison: Comparison) -> "ScorePanel":
    from gerund.reporting.plots.scores import ScorePanel

    scores = {
        column.label: (cell.value, cell.result.score.spread)
        for column, cell in zip(comparison.columns, row.cells, strict=True)
        if cell is not None
    }
    return ScorePanel(
        f"{row.title}, {kind}",
        scores,
        percent=row.unit in PERCENTS,
        higher_is_better=row.higher_is_better,
        marks_best=row.comparable,
    )


def _maps(models: Sequence[Encoder], tasks: Sequence[Task], config: EvaluationConfig) -> Iterator[Wanted]:
    """Yield a map of a few sets of labelled texts, clustering first: those texts are not learnt from."""
    first = sorted(tasks, key=lambda task: task.kind != "clustering")
    for task, data in _with_data(first, config, LabelledTexts, _MOST_MAPS):
        yield f"A map of {task.title}", partial(_map_of, task, data, models, config)


def _histograms(models: Sequence[Encoder], tasks: Sequence[Task], config: EvaluationConfig) -> Iterator[Wanted]:
    for task, data in _with_data(tasks, config, RatedPairs, _MOST_HISTOGRAMS):
        yield f"The cosines of {task.title}", partial(_histogram_of, task, data, models, config)


def _with_data(
    tasks: Iterable[Task], config: EvaluationConfig, kind: type[AnyData], most: int
) -> Iterator[tuple[Task, AnyData]]:
    """Yield up to ``most`` tasks with data of a kind for a figure; of tasks on the same files only the first."""
    seen: set[object] = set()
    for task in tasks:
        source = frozenset(task.files) or task.name
        if len(seen) == most or source in seen or task.side != "representation":
            continue
        # The files were read when the task ran; where they have changed since then there is no picture.
        with suppress(DataError):
            data = task.picture_data(config)
            if isinstance(data, kind):
                seen.add(source)
                yield task, data


def _map_of(task: Task, data: LabelledTexts, models: Sequence[Encoder], config: EvaluationConfig) -> Picture:
    from gerund.reporting.plots.embeddings import embedding_maps
    from gerund.reporting.plots.style import picture

    prompt = task.prompt(config)
    vectors = {system.label: system.encode(data.texts, prompt=prompt, show=config.show_progress) for system in models}
    figure = embedding_maps(vectors, data.labels, title=task.title, seed=config.seed, most_points=_MOST_POINTS)
    return Picture(
        task.title,
        "The same texts as each system embeds them, by t-SNE: what is near on the map is near in the encoder's "
        "eyes; colours are classes. Distances between far groups mean little.",
        f"Maps of the texts of {task.title} by class, one for each of {_names(models)}.",
        picture(figure),
        "Where the classes lie",
    )


def _histogram_of(task: Task, data: RatedPairs, models: Sequence[Encoder], config: EvaluationConfig) -> Picture:
    from gerund.reporting.plots.embeddings import pair_cosines, separation, similarity_histograms
    from gerund.reporting.plots.style import picture

    prompt, show = task.prompt(config), config.show_progress
    cosines = {
        system.label: pair_cosines(
            system.encode(data.left, prompt=prompt, show=show), system.encode(data.right, prompt=prompt, show=show)
        )
        for system in models
    }
    figure = similarity_histograms(cosines, data.ratings, title=task.title)
    separations = {name: separation(values, data.ratings) for name, values in cosines.items()}
    effects = ", ".join(
        f"{name} {separation.effect:.1f} standard deviations apart" for name, separation in separations.items()
    )
    return Picture(
        task.title,
        "Cosines of pairs by how alike people found them. An encoder of use sets the colours apart; where all pairs "
        "are near 1, everything looks alike to it.",
        f"Histograms of cosines of {task.title}; lowest and highest rated pairs: {effects}.",
        picture(figure),
        "How alike pairs are",
    )


def _names(models: Sequence[Encoder]) -> str:
    return ", ".join(system.label for system in models)


def _attention(models: Sequence[LanguageModelSystem]) -> Iterator[Wanted]:
    """Yield a figure of every plan of every model; of the unmodified model only where there is no other."""
    by_plan = {(system.lm.weights_hash, system.lm.runtime.plan): system for system in models}
    converted = {weights for weights, plan in by_plan if not plan.is_causal}
    chosen = [system for (weights, plan), system in by_plan.items() if not plan.is_causal or weights not in converted]
    for system in chosen[:_MOST_PLANS]:
        name = label_of(system.lm.encoder, system.lm.n_layers)
        yield f"The attention of {system.label}", partial(_attention_of, system, name)


def _attention_of(system: LanguageModelSystem, name: str) -> Picture:
    from gerund.inference.inspection import EXAMPLE_TEXTS, inspect_attention, sink_fraction
    from gerund.reporting.plots.attention import attention_figure
    from gerund.reporting.plots.style import picture

    maps = inspect_attention(system.lm.runtime, EXAMPLE_TEXTS)
    figure = attention_figure(maps.before, maps.after, title=f"{name}, {system.lm.n_layers} layers", even=maps.even)
    single = [item for item in maps.after if item.run == 0]
    before, after = fmean(sink_fraction(maps.before)), fmean(sink_fraction(single))
    return Picture(
        system.label,
        f"Mean attention over {len(maps.ids)} English sentences and all heads, before and after the conversion. "
        f"The first token takes {before:.0%} of the attention before and {after:.0%} after, on average over layers.",
        f"Attention maps of {system.label}, layer by layer, before and after, and the fraction of the first token.",
        picture(figure),
        "Attention before and after",
    )
