"""Shards are worked on in this process or in several, and a killed process ends in a sentence."""

import os
import signal
from contextlib import closing

import pytest

from gerund.errors import ConfigError, ResourceError
from gerund.jobs.engine import LocalEngine, cores


def square(number: int) -> int:
    return number * number


def where(_number: int) -> int:
    return os.getpid()


def killed(number: int) -> int:
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("workers", [1, 2])
def test_every_shard_once_with_its_result(workers):
    found = dict(LocalEngine(workers).map(square, iter(range(7))))
    assert found == {number: number * number for number in range(7)}


def test_one_worker_or_one_shard_needs_no_process():
    assert {pid for _, pid in LocalEngine(1).map(where, range(3))} == {os.getpid()}
    assert [pid for _, pid in LocalEngine(2).map(where, [1])] == [os.getpid()]
    assert list(LocalEngine(2).map(where, [])) == []


def test_few_shards_are_read_ahead():
    read = []

    def shards():
        for number in range(50):
            read.append(number)
            yield number

    with closing(LocalEngine(2).map(square, shards())) as finished:
        next(finished)
        assert len(read) <= 5


def test_a_process_that_is_killed():
    with pytest.raises(ResourceError, match="a process was ended from outside, perhaps because memory ran out"):
        list(LocalEngine(2).map(killed, range(9)))


def test_workers():
    assert LocalEngine().workers == cores() >= 1
    with pytest.raises(ConfigError, match="workers=0 leaves nobody to work"):
        LocalEngine(0)
