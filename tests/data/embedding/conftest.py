"""Ten short texts in a file, and where their vectors go."""

import os

import pytest

from tests.data.embedding.jobs import TEXTS


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(params=["parquet", "npy"])
def output(request, tmp_path):
    return tmp_path / "new" / f"out.{request.param}"
