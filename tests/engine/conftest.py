"""A small model, and an engine around it."""

import pytest

from gerund import Engine, EngineConfig
from tests.engine.common import tiny_lm


@pytest.fixture(scope="module")
def plain():
    return tiny_lm()


@pytest.fixture
def engine(plain):
    with Engine(plain, EngineConfig(slots=4, queue_tokens=200)) as running:
        yield running
        running.close()
