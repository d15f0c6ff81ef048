"""Before any process is started: what is refused, what is estimated, what accelerate reads."""

import json
from pathlib import Path

import pytest
import yaml

from gerund.errors import ConfigError
from gerund.training.estimate import estimate
from gerund.training.processes import check_machine, check_processes
from gerund.training.recipe import load_recipe
from tests.cli.helpers import run_cli

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate.yaml"


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


class TestEstimate:
    def test_memory_of_several_processes(self, recipe):
        alone = estimate(recipe())
        shared = estimate(recipe("sharding=fsdp2", "objectives.causal.micro_batch_size=null"), processes=2)
        # The steps of the whole training read the same tokens.
        assert (shared.tokens, shared.tokens_per_step) == (alone.tokens, alone.tokens_per_step)
        assert (shared.memory.processes, shared.memory.sharding) == (2, "fsdp2")
        assert (alone.memory.processes, alone.memory.sharding, alone.memory.gathered) == (1, "none", 0)

    def test_is_printed(self, settings, write_recipe):
        ran = run_cli("train", write_recipe(settings), "--processes", 2, "--dry-run")
        assert ran.code == 0
        lines = dict(line.split(None, 1) for line in ran.out.splitlines())
        assert lines["weights"] == "1 MiB in each of 2 processes (sharding: none)"
        assert {"gradients", "optimizer", "activations"} <= lines.keys()
        ran = run_cli("train", write_recipe(settings), "--processes", 2, "--dry-run", "--json")
        assert json.loads(ran.out)["memory"]["processes"] == 2
