"""Processes that start, or do not: what is refused before, several machines, one mistake in two, shared rows."""

import json
import os
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from gerund.errors import ConfigError
from gerund.jobs.files import lock_folder
from gerund.training.processes import check_machine, check_processes, gather_numbers, gather_rows
from gerund.training.recipe import load_recipe
from tests.cli.helpers import run_cli
from tests.training.processes.one_of_two import work, work_gathering, work_nodes
from tests.training.processes.recipes import recipes
from tests.training.processes.starting import start_two, started

EXAMPLE = Path(__file__).parents[3] / "examples" / "accelerate.yaml"


@pytest.fixture
def recipe(settings, write_recipe, tmp_path):
    def recipe(*overrides):
        adamw = "optimizer={name: adamw, learning_rate: 0.01}"
        return load_recipe(write_recipe(settings), [f"output={tmp_path / 'out'}", adamw, *overrides])

    return recipe


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.name=muon", "optimizer muon works on whole matrices"),
        ("optimizer.name=adafactor", "optimizer adafactor works on whole matrices"),
        ("snapshot_steps=2", "snapshot_steps needs whole weights"),
        ("compile=true", "compile was never tried with shards"),
    ],
)
def test_what_shards_cannot_do_is_refused(recipe, monkeypatch, override, message):
    monkeypatch.setattr("shutil.which", lambda name: name)  # a compiler
    sharded = recipe("sharding=fsdp2", override)
    with pytest.raises(ConfigError, match=f"^{message}.*sharding=none$"):
        check_machine(sharded, 2)
    # One process has all of it, whatever the recipe says.
    check_machine(sharded, 1)


def test_accelerates_own_fsdp_is_refused(recipe, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match=r"^accelerate's own FSDP is not used: give the recipe sharding=fsdp2"):
        check_machine(recipe(), 2)


def test_accelerate_knows_the_example():
    from accelerate.commands.config.config_args import load_config_from_file

    config = load_config_from_file(str(EXAMPLE))
    assert str(config.distributed_type) == "DistributedType.MULTI_GPU"
    assert config.num_processes == yaml.safe_load(EXAMPLE.read_text("utf-8"))["num_processes"]


class TestProcesses:
    def test_more_than_there_are_gpus(self, monkeypatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        check_processes(2)
        with pytest.raises(ConfigError, match=r"^--processes 3, and this machine has 2 GPUs"):
            check_processes(3)

    def test_under_a_launcher(self, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(ConfigError, match=r"^--processes starts processes itself; leave it out under torchrun"):
            check_processes(2)

    def test_a_batch_that_cannot_be_shared_starts_nothing(self, settings, write_recipe, monkeypatch):
        monkeypatch.setattr("gerund.training.processes.launch", lambda *_: pytest.fail("processes were started"))
        ran = run_cli("train", write_recipe(settings), "--processes", 3)
        assert ran.mistake == "causal: 3 processes cannot share a batch of 8"

    def test_the_command_is_handed_on(self, settings, write_recipe, monkeypatch):
        started = []
        monkeypatch.setattr("gerund.training.processes.launch", lambda *given: started.append(given) or 3)
        path = write_recipe(settings)
        assert run_cli("train", path, "steps=12", "--processes", 2, "--resume", "--json").code == 3
        assert started == [(["train", "--resume", "--json", "--", str(path), "steps=12"], 2)]


@pytest.mark.slow
def test_a_folder_that_another_training_writes(paired_corpus, base, tmp_path):
    """The first process alone takes the lock; what it is refused with, the other says too."""
    out = tmp_path / "out"
    content = {**recipes(paired_corpus, base, tmp_path / "cache")["causal"], "output": str(out)}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content), "utf-8")
    jobs = [{"recipe": str(tmp_path / "recipe.yaml"), "overrides": []}]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    with lock_folder(out):
        start_two(work, tmp_path)
        assert [path.name for path in out.iterdir()] == ["lock"]
    expected = [f"process {os.getpid()} is writing {out} already; wait for it or choose another name"]
    for rank in range(2):
        assert json.loads((tmp_path / f"stopped-{rank}.json").read_text()) == expected


@pytest.mark.slow
def test_two_machines(tmp_path):
    """One process a machine makes what lies on its disk, and a folder that only one of them has is refused."""
    start_two(work_nodes, tmp_path)
    assert (tmp_path / "order.txt").read_text().splitlines() == ["0 begins", "0 ends", "1 begins", "1 ends"]
    refused = f"process 1 does not see what the first one writes into {tmp_path / 'own-'}"
    for rank in range(2):
        shared, own = json.loads((tmp_path / f"nodes-{rank}.json").read_text())
        assert shared is None
        assert own.startswith(f"{refused}{rank}: several nodes need an output folder that all of them share")
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.full
def test_the_command_starts_processes_itself(paired_corpus, base, tmp_path):
    """``--processes``: the first one alone says what was made."""
    content = recipes(paired_corpus, base, tmp_path / "cache")["unimae"]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**content, "output": str(tmp_path / "out"), "sharding": "fsdp2"}), "utf-8")
    done = started("train", str(path), "--processes", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == str(tmp_path / "out" / "model")
    assert done.stderr.count("step 4/4  loss") == 1


@pytest.mark.slow
def test_a_mistake_in_one_process_ends_both_soon(paired_corpus, base, tmp_path):
    """The first process alone reads files; the other must not wait for it in vain."""
    content = recipes(paired_corpus, base, tmp_path / "cache")["unimae"]
    content["objectives"][1]["pairs"] = {"files": ["absent.jsonl"]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**content, "output": str(tmp_path / "out")}), "utf-8")
    done = started("train", str(tmp_path / "recipe.yaml"), "--processes", "2")
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("gerund: error: ")]
    assert f"gerund: error: {paired_corpus / 'absent.jsonl'}: no such file" in told[0]
    # The other is stopped by the launcher, or finds out and says so.
    assert all("another process of this training has ended" in line for line in told[1:])
    # Neither torch's call nor its launcher's report.
    assert "distributed" not in done.stderr
    assert not (tmp_path / "out" / "recipe.json").exists()


@pytest.fixture(scope="module")
def gathered(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    start_two(work_gathering, folder)
    return [load_file(folder / f"{rank}.safetensors") for rank in range(2)]


@pytest.mark.slow
def test_rows_come_in_the_order_of_the_ranks(gathered):
    for rank, results in enumerate(gathered):
        assert results["rows"].tolist() == [[0, 2], [1, 3], [10, 12], [11, 13]]
        assert results["first"].item() == 2 * rank
        assert results["numbers"].tolist() == [5, 7, 6, 8]
        assert results["numbers"].dtype == torch.int64


@pytest.mark.slow
def test_unequal_rows_are_told_in_both_processes(gathered):
    said = [
        {name: bytes(results[name].tolist()).decode() for name in ("more rows", "wider rows", "more numbers")}
        for results in gathered
    ]
    assert said[0] == said[1]
    start = "every process has to bring as many rows of one width, but process 0 has 2 of width "
    assert said[0]["more rows"] == f"{start}3, process 1 has 3 of width 3"
    assert said[0]["wider rows"] == f"{start}3, process 1 has 2 of width 4"
    assert said[0]["more numbers"] == f"{start}1, process 1 has 3 of width 1"
    assert [results["still in step"].flatten().tolist() for results in gathered] == [[0, 1], [0, 1]]


def test_one_process_keeps_its_rows():
    rows = torch.randn(3, 2, requires_grad=True)
    assert gather_rows(rows) == (rows, 0)
    numbers = torch.arange(3)
    assert gather_numbers(numbers) is numbers
