"""Progress: lines where there is no terminal and a command asks for them, silence in a library."""

import multiprocessing
import re
import threading

import pytest

from gerund.progress import printed_notes, progress, progress_lines, say_once


def test_a_library_is_silent_off_a_terminal(capsys):
    with progress(3, "encoding") as advance:
        advance(3)
    assert capsys.readouterr() == ("", "")


def test_a_command_says_how_far_it_is(capsys):
    before = threading.active_count()
    with progress_lines(0.02), progress(1000, "encoding") as advance:
        advance(250)
        told = ""
        while told.count("\n") < 2:
            told += capsys.readouterr().err
        advance(750)
    assert all(line.startswith("gerund: encoding: ") for line in told.splitlines())
    assert re.search(r"encoding: 250 of 1,000 in \d+ s, about \d+ s left", told)
    assert re.search(r"gerund: encoding: 1,000 of 1,000 in \d+ s\n\Z", capsys.readouterr().err)
    assert threading.active_count() == before


def test_a_short_stage_and_one_that_is_silenced_write_nothing(capsys):
    with progress_lines():
        with progress(None, "reading") as advance:
            advance(1)
        with progress_lines(0.001), progress(None, "reading", show=False):
            threading.Event().wait(0.02)
    assert capsys.readouterr().err == ""
    with progress(None, "reading"):  # the block of lines has ended
        pass
    assert capsys.readouterr().err == ""


def test_a_process_that_another_one_started_is_silent_unless_it_prints_notes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    say_once.cache_clear()
    say_once("a note")
    assert not caplog.text
    with printed_notes():
        for _ in range(2):
            say_once("a note")
    assert capsys.readouterr().err == "gerund: a note\n"
