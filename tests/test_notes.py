"""Notes are said once, by one process of several."""

import multiprocessing

import pytest

from gerund.progress import printed_notes, say_once


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
