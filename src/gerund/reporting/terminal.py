"""Print the comparison table on a terminal or in a pipe."""

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gerund.reporting.comparison import NOTHING, Comparison, Group, Mean, Row, Section, Significance

_GAP = 2
# Differences that are printed; a page has room for all.
_MOST_LEADS = 12
# Names of systems wrap beyond this, names of tasks beyond this fraction of the console.
_WIDEST_LABEL = 20
_FRACTION_OF_NAMES = 0.4


def render(comparison: Comparison, console: Console, significance: Significance = NOTHING) -> None:
    """Print the table; in several blocks of systems where the console is too narrow for all, and notes below.

    The best of a row has a star. In a pipe there are no colours and no spaces at the ends of lines.
    """
    layout = _Layout(comparison, console)
    with console.capture() as captured:
        for places in layout.blocks():
            console.print(_block(comparison, places, layout))
            console.print()
        _print_legend(comparison, console, layout)
        _print_leads(significance, console)
    text = captured.get()
    if not console.is_terminal:
        text = "\n".join(line.rstrip() for line in text.splitlines()) + "\n"
    # Names may hold anything, and the other end may know ASCII alone.
    console.file.write(text.encode(console.encoding, "replace").decode(console.encoding))


class _Layout:
    """Widths of the columns, and the characters that arrive at the other end."""

    def __init__(self, comparison: Comparison, console: Console) -> None:
        utf = "utf" in console.encoding
        self.up, self.down, self.plus_minus = ("↑", "↓", "±") if utf else ("(up)", "(down)", "+-")
        cells = [cell for row in comparison.rows for cell in row.present]
        groups = [group for section in comparison.sections for group in section.groups]
        owners = [*[section.mean for section in comparison.sections], *[group.mean for group in groups]]
        means = [mean for mean in owners if mean is not None]
        numbers = [cell.shown for cell in cells] + [text for mean in means for text in mean.shown]
        self.number = max((len(text) for text in numbers), default=1)
        self.spread = max((len(self.spread_of(cell.spread)) for cell in cells), default=0)
        notes = max((len(notes_text(cell.notes)) for cell in cells), default=0)
        self._labels = [cell_len(column.label) for column in comparison.columns]
        widest = min(_WIDEST_LABEL, max(self._labels, default=1))
        self.column = max(self.number + 1 + self.spread + notes, widest)
        names = [cell_len(self.group_name(group)) for group in groups]
        names += [cell_len(self.row_name(row, group)) for group in groups for row in group.rows]
        names += [len(mean.label) + 2 for mean in means]
        self.names = min(max(names, default=1), int(_FRACTION_OF_NAMES * console.width))
        self._width = console.width

    def blocks(self) -> list[range]:
        """Return the columns of each block of the table; blocks have about equal size."""
        count = len(self._labels)
        fitting = max(1, (self._width - self.names) // (self.column + _GAP))
        blocks = max(1, -(-count // fitting))
        size = max(1, -(-count // blocks))
        return [range(start, min(start + size, count)) for start in range(0, count, size)]

    def way(self, higher_is_better: bool) -> str:
        """Return the arrow that shows which way is up."""
        return self.up if higher_is_better else self.down

    def spread_of(self, spread: str | None) -> str:
        """Return a spread as it follows a number."""
        return f" {self.plus_minus}{spread}" if spread is not None else ""

    def group_name(self, group: Group) -> str:
        """Return the kind, with the metric where all its tasks share it."""
        if group.metric is None:
            return group.kind
        return f"{group.kind}: {group.metric} {self.way(group.rows[0].higher_is_better)}"

    def row_name(self, row: Row, group: Group) -> str:
        """Return the task, with its metric where it is not the whole kind's."""
        metric = "" if group.metric is not None else f": {row.metric} {self.way(row.higher_is_better)}"
        return f"  {row.title}{metric}{notes_text(row.notes)}"


def notes_text(notes: tuple[int, ...]) -> str:
    """Return numbers of notes as they stand behind a number.

    >>> notes_text((1, 3))
    ' [1,3]'
    """
    return f" [{','.join(map(str, notes))}]" if notes else ""


def _block(comparison: Comparison, places: range, layout: _Layout) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
    table.add_column("", width=layout.names, overflow="fold")
    for place in places:
        table.add_column(Text(comparison.columns[place].label), width=layout.column, overflow="fold")
    for number, section in enumerate(comparison.sections):
        if number:
            table.add_row()
        _add_section(table, section, places, layout)
    return table


def _add_section(table: Table, section: Section, places: range, layout: _Layout) -> None:
    table.add_row(Text(section.side.upper(), style="bold cyan"))
    for group in section.groups:
        table.add_row(Text(layout.group_name(group), style="bold"))
        for row in group.rows:
            table.add_row(Text(layout.row_name(row, group)), *(_cell(row, place, layout) for place in places))
        if group.mean is not None and len(group.rows) > 1:
            _add_mean(table, f"  {group.mean.label}", group.mean, places, layout)
    if section.mean is not None and len(section.groups) > 1:
        _add_mean(table, section.mean.label, section.mean, places, layout)


def _add_mean(table: Table, label: str, mean: Mean, places: range, layout: _Layout) -> None:
    cells = [_number(mean.shown[place], mean.best[place], layout) for place in places]
    table.add_row(Text(label), *cells, style="italic")


def _cell(row: Row, place: int, layout: _Layout) -> Text:
    cell = row.cells[place]
    if cell is None:
        return Text("-".rjust(layout.number), style="dim")
    text = _number(cell.shown, cell.best, layout)
    text.append(layout.spread_of(cell.spread).ljust(layout.spread), style="dim")
    return text.append(notes_text(cell.notes), style="dim")


def _number(shown: str, best: bool, layout: _Layout) -> Text:
    return Text(shown.rjust(layout.number) + ("*" if best else " "), style="bold green" if best else "")


def _print_leads(significance: Significance, console: Console) -> None:
    """Print how sure the differences to the best are, the least sure first: these a reader has to know."""
    apart = [lead for lead in significance.leads if lead.verdict != "equal"]
    leads = sorted(apart, key=lambda lead: -lead.p)
    if not leads:
        return
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold", title_justify="left")
    for name in ("difference to the best", "better", "than", "by (95% interval), chance"):
        table.add_column(Text(name), overflow="fold")
    for lead in leads[:_MOST_LEADS]:
        words = (lead.task, lead.best, lead.other, lead.text)
        table.add_row(*map(Text, words), style="" if lead.is_sure else "yellow")
    console.print()
    console.print(table)
    if len(leads) > _MOST_LEADS:
        console.print(Text(f"{len(leads) - _MOST_LEADS} more, all of them surer, in report.html", style="dim"))


def _print_legend(comparison: Comparison, console: Console, layout: _Layout) -> None:
    words = [f"{layout.up} higher is better, {layout.down} lower is better"]
    if any(cell.best for row in comparison.rows for cell in row.present):
        words.append("* best of its row")
    if layout.spread:
        words.append(f"{layout.plus_minus} standard deviation over runs")
    console.print(Text("; ".join(words), style="dim"))
    for remark in comparison.remarks:
        console.print(Text(remark))
    if comparison.notes:
        notes = Table.grid(padding=(0, 1, 0, 0))
        for number, note in enumerate(comparison.notes, start=1):
            notes.add_row(Text(f"[{number}]"), Text(note))
        console.print(notes)
