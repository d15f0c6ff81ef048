"""Two processes share rows in the order of their ranks, and are told where these do not fit."""

import pytest
import torch
from safetensors.torch import load_file

from gerund.training.processes import gather_numbers, gather_rows
from tests.training.losses.two_processes import work
from tests.training.processes.starting import start_two


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    start_two(work, folder)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.slow
def test_rows_come_in_the_order_of_the_ranks(found):
    for rank, results in enumerate(found):
        assert results["rows"].tolist() == [[0, 2], [1, 3], [10, 12], [11, 13]]
        assert results["first"].item() == 2 * rank
        assert results["numbers"].tolist() == [5, 7, 6, 8]
        assert results["numbers"].dtype == torch.int64


@pytest.mark.slow
def test_unequal_rows_are_told_in_both_processes(found):
    said = [
        {name: bytes(results[name].tolist()).decode() for name in ("more rows", "wider rows", "more numbers")}
        for results in found
    ]
    assert said[0] == said[1]
    start = "every process has to bring as many rows of one width, but process 0 has 2 of width "
    assert said[0]["more rows"] == f"{start}3, process 1 has 3 of width 3"
    assert said[0]["wider rows"] == f"{start}3, process 1 has 2 of width 4"
    assert said[0]["more numbers"] == f"{start}1, process 1 has 3 of width 1"
    assert [results["still in step"].flatten().tolist() for results in found] == [[0, 1], [0, 1]]


def test_one_process_keeps_its_rows():
    rows = torch.randn(3, 2, requires_grad=True)
    assert gather_rows(rows) == (rows, 0)
    numbers = torch.arange(3)
    assert gather_numbers(numbers) is numbers
