"""The table on consoles of all kinds: everything is there, nothing is wider than the console."""

import io
import re
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from gerund.reporting.comparison import compare, render
from tests.reporting.results import made, several

HOSTILE = "<b>[red]ü 雪[/red]\x07 & 'a very long name of a system' " + "x" * 60


def printed(results, width=80, **config):
    console = Console(file=io.StringIO(), width=width, **config)
    render(compare(results), console)
    return console.file.getvalue()


def flat(text):
    """Return the text with all white space folded, so that wrapping does not matter."""
    return " ".join(text.split())


@pytest.mark.parametrize("width", [40, 80, 200])
def test_all_numbers_are_there_and_no_line_is_too_long(width):
    text = printed(several(), width)
    for cell in (cell for row in compare(several()).rows for cell in row.present):
        assert cell.shown in text
    assert max(cell_len(line) for line in text.splitlines()) <= width


def test_a_wide_console_has_one_block():
    text = printed(several(), 200)
    assert text.splitlines()[0].split() == ["causal", "mask0-bidir", "k=2", "other:", "causal", "bm25"]
    assert text.count("REPRESENTATION") == 1
    line = next(line for line in text.splitlines() if line.startswith("  one"))
    assert line.split() == ["one", "[1]", "41.00", "52.00*", "52.00*", "-"]


def test_a_narrow_console_has_several_blocks_of_about_equal_size():
    text = printed(several(), 60)
    assert text.count("REPRESENTATION") == 2
    blocks = text.split("REPRESENTATION")
    assert "causal" in blocks[0]
    assert "bm25" not in blocks[0]
    assert "bm25" in blocks[1]
    # Notes and explanations stand once, at the end.
    assert text.count("higher is better") == 1
    assert text.count("The sets overlap.") == 1


def test_a_pipe_gets_plain_lines():
    text = printed(several(), 120)
    assert not re.search(r"[\x1b\u2500-\u257f]", text)
    assert all(line == line.rstrip() for line in text.splitlines())


def test_a_terminal_gets_colours_and_the_same_words():
    text = printed(several(), 120, force_terminal=True, color_system="standard", legacy_windows=False)
    assert "\x1b[" in text
    assert flat(re.sub(r"\x1b\[[\d;]*m", "", text)) == flat(printed(several(), 120))


def test_arrows_spreads_stars_and_notes():
    text = printed(several(), 120)
    assert "sts: main ↑" in text
    assert "perplexity: main ↓" in text
    assert re.search(r"one +60\.00 +±1\.23 +65\.00\* ±1\.23", text)
    assert "* best of its row" in text
    assert "± standard deviation over runs" in text
    assert "\n[1] The sets overlap.\n" in text
    assert re.search(r"mean of 4 of 5 tasks +25\.25 +34\.75 +35\.50\*", text)


def test_what_is_not_there_is_not_explained():
    text = printed([made("sts/one", "a", 0.5)])
    assert "best" not in text
    assert "±" not in text
    assert "[1]" not in text
    assert "mean" not in text


def test_remarks_stand_below_once():
    text = printed([made("sts/one", name, 0.5, notes=("Both know this",)) for name in "ab"])
    assert text.endswith("lower is better\nBoth know this.\n")


def test_without_unicode_the_signs_are_ascii():
    file = SimpleNamespace(encoding="ascii", text="")
    file.write = lambda text: setattr(file, "text", file.text + text)
    file.flush = lambda: None
    render(compare([*several(), made("sts/雪", "causal", 0.5)]), Console(file=file, width=100))
    assert file.text.isascii()
    assert "  ?" in file.text
    assert "sts: main (up)" in file.text
    assert "+-1.23" in file.text


def test_hostile_names_are_printed_as_they_are():
    text = printed([made(f"sts/{HOSTILE}", HOSTILE, 0.5), made("sts/one", "b", 0.4)], 80)
    assert max(cell_len(line) for line in text.splitlines()) <= 80
    assert "[red]" in flat(text).replace(" ", "")
    assert "\x07" not in text


def test_a_metric_that_is_not_the_whole_kinds_stands_with_its_task():
    results = [made("sts/one", "a", 0.5), made("sts/two", "a", 0.5, higher_is_better=False)]
    text = printed(results)
    assert "  one: main ↑" in text
    assert "  two: main ↓" in text


def test_nothing_to_print():
    assert "higher is better" in printed([])
