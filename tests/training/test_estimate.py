"""A dry run: steps of every stage, and memory by use, which is counted tensor by tensor and divided by shards."""

import json

import pytest
import torch
from torch import nn

from gerund.training import estimate as estimates
from gerund.training.estimate import ActivationMemory, estimate, memory_use
from gerund.training.recipe import load_recipe
from gerund.training.step import TrainingModule
from tests.cli.helpers import run_cli

MIB = 2**20


def test_counts_what_a_step_keeps_and_forgets_what_is_let_go():
    layer = nn.Linear(256, 256, bias=False)
    rows = torch.randn(1024, 256)  # 1 MiB
    kept = ActivationMemory(layer)
    with kept.counting():
        loss = layer(rows).square().sum()
        # The input for the weight's gradient and the output for the square's; the weight itself is none.
        assert kept.now == 2 * MIB
        loss.backward()
        loss = None
        assert kept.now == 0
        layer(rows)
    assert kept.peak == 2 * MIB


def test_a_tensor_that_is_kept_twice_counts_once():
    kept = ActivationMemory(nn.Identity())
    one = torch.ones(MIB // 4, requires_grad=True)
    with kept.counting():
        product = one * 1.0
        square = product * product
        assert kept.now == MIB
    del product, square
    assert kept.now == 0


def test_uses():
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.Linear(512, 1024, bias=False))  # 1 and 2 MiB
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    model[1].weight.grad = torch.ones_like(model[1].weight)
    optimizer.step()

    def used(processes, sharding):
        given = {"activations": 3 * MIB, "processes": processes, "sharding": sharding}
        found = memory_use(model, [model[1]], optimizer, **given)
        return found.weights, found.gradients, found.optimizer, found.activations, found.gathered

    assert used(1, "none") == used(2, "none") == used(1, "fsdp2") == (3, 2, 5, 3, 0)  # and a step count
    assert used(2, "fsdp2") == (2, 1, 3, 3, 3)


class TestEstimate:
    def test_memory_of_several_processes(self, settings, write_recipe, tmp_path):
        settings["optimizer"] = {"name": "adamw", "learning_rate": 0.01}
        path, here = write_recipe(settings), f"output={tmp_path / 'out'}"
        alone = estimate(load_recipe(path, [here]))
        shards = [here, "sharding=fsdp2", "objectives.causal.micro_batch_size=null"]
        shared = estimate(load_recipe(path, shards), processes=2)
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
        assert "tokens per step    128 at most for causal" in ran.out
        assert "estimated time" in ran.out
        ran = run_cli("train", write_recipe(settings), "--processes", 2, "--dry-run", "--json")
        assert (json.loads(ran.out)["memory"]["processes"], json.loads(ran.out)["tokens_per_step"]) == (2, 128)

    def test_every_kind_of_text_before_there_is_a_tokenizer(self, settings, write_recipe, tmp_path):
        objectives = "objectives=[{kind: mntp, length: 16, batch_size: 2}, {kind: simcse, length: 16, batch_size: 2}]"
        encoder = "encoder={attention: bidir, append_eos: true}"
        found = estimate(load_recipe(write_recipe(settings), [objectives, encoder, f"output={tmp_path / 'out'}"]))
        assert found.objectives == {"mntp": 32, "simcse": 64}

    def test_takes_steps_of_every_stage(self, settings, write_recipe, tmp_path, monkeypatch):
        taken = []
        own = TrainingModule.forward

        def forward(self, name, part, **more):
            taken.append(name)
            return own(self, name, part, **more)

        monkeypatch.setattr(TrainingModule, "forward", forward)
        end_token = "encoder={attention: causal, pooling: last, append_eos: true}"
        objectives = (
            "objectives=[{kind: unimae, length: 16, batch_size: 2, weight: [[0, 1], [3, 0], [9, 2]]}, "
            "{kind: simcse, length: 16, batch_size: 4, weight: [[0, 0], [3, 1], [5, 0.5], [9, 0]]}]"
        )
        found = estimate(load_recipe(write_recipe(settings), [objectives, end_token, f"output={tmp_path / 'out'}"]))
        # SimCSE reads its four texts twice; twelve steps, of which six are the second stage's.
        assert found.objectives == {"unimae": 32, "simcse": 128}
        assert (found.tokens_per_step, found.tokens) == (128, 6 * 32 + 6 * 128)
        assert taken == ["unimae"] * 3 + ["simcse"] * 6
        assert found.seconds_per_step == pytest.approx(found.seconds / 12)

    def test_takes_two_steps_where_they_are_long(self, settings, write_recipe, tmp_path, monkeypatch):
        taken = []
        monkeypatch.setattr(estimates, "_timed_step", lambda *_: taken.append(1) or 20.0 - 4 * len(taken))
        recipe = load_recipe(write_recipe(settings), [f"output={tmp_path / 'out'}"])
        # 16 and 12 seconds leave time for a third step of 8.
        assert estimate(recipe).seconds == 16 + 10 * (recipe.steps - 1)
        assert len(taken) == 3
        taken.clear()
        monkeypatch.setattr(estimates, "_LONG_SECONDS", 28.0)
        assert estimate(recipe).seconds == 16 + 12 * (recipe.steps - 1)
        assert len(taken) == 2

    def test_writes_nothing(self, settings, write_recipe, tmp_path):
        found = estimate(load_recipe(write_recipe(settings), [f"output={tmp_path / 'out'}"]))
        assert (found.tokens_per_step, found.tokens) == (128, 1536)
        attention, feed_forward, norms = 2 * 16 * 16 + 2 * 16 * 8, 3 * 16 * 32, 2 * 16
        assert found.trained_parameters == found.parameters == 320 * 16 + 2 * (attention + feed_forward + norms) + 16
        assert found.seconds > 0
        assert found.seconds_per_step == pytest.approx(found.seconds / 12)
        assert not (tmp_path / "out").exists()
