"""One optimizer step: parts of any size, weights and their schedules, and validation."""

import pytest
import torch

from gerund.inference.encode.runtime import EncoderRuntime
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.training.corpus.pairs import Example, Examples
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.objectives.base import Batches, Objective
from gerund.training.objectives.contrastive import ContrastiveLosses, ExampleBatches, TextGroup
from gerund.training.objectives.hybrid import HybridLosses
from gerund.training.objectives.settings import MntpConfig, MsgConfig, SupervisedConfig, UnimaeConfig
from gerund.training.objectives.unimae import UnimaeBatches, UnimaeLosses
from gerund.training.step import StepData, TrainingModule, evaluate_batches, run_step
from tests.training.objectives.conftest import Rows, doubled, gpt2
from tests.training.objectives.test_hybrid import hybrid

LENGTHS = (30, 9, 17, 4, 1, 23, 12, 8)
WORDS = ["the", "cat", "dog", "house", "runs", "sleeps", "under", "over", "red", "blue"]


class Workshop:
    """Objectives on one model, with whatever weights and sizes a test wants."""

    def __init__(self, tokenizer, rows, **dropouts):
        self.tokenizer, self.rows, self.model = tokenizer, rows, gpt2(len(tokenizer), **dropouts)
        torch.manual_seed(1)
        self.heads = {"unimae": doubled(UnimaeLosses(16, 2, 40))}

    def hybrid(self, *, mntp=1.0, msg=1.0, micro=None, batch_size=6):
        sizes = {"batch_size": batch_size, "micro_batch_size": micro}
        configs = {
            "mntp": MntpConfig(kind="mntp", weight=mntp, **sizes),
            "msg": MsgConfig(kind="msg", weight=msg, **sizes),
        }
        batches = hybrid(self.tokenizer, self.rows, mntp={}, msg={})
        return Objective("mntp+msg", batches, HybridLosses(2, ("mntp", "msg")), configs)

    def unimae(self, *, weight=1.0, alpha=0.1, micro=None, batch_size=6):
        config = UnimaeConfig(kind="unimae", weight=weight, alpha=alpha, batch_size=batch_size, micro_batch_size=micro)
        formatter = InputFormatter(self.tokenizer, append_eos=True)
        batches = UnimaeBatches(Rows(self.rows), formatter, config, mask_id=3, pad=2, seed=4)
        configs = {"mar": config, "mrc": config}
        return Objective("unimae", batches, self.heads["unimae"], configs, factors={"mar": alpha})

    def contrastive(self, *, weight=1.0, micro=None, batch_size=6, projection=None):
        config = SupervisedConfig(
            kind="contrastive", pairs={"files": ["x"]}, weight=weight, batch_size=batch_size, micro_batch_size=micro
        )
        encoder = EncoderConfig(attention=AttentionPlan("bidir"))
        runtime = EncoderRuntime(self.model, self.tokenizer, encoder, encoder.attention.resolve(2))
        examples = [
            Example(f"{WORDS[i]} {WORDS[-i]}", " ".join(WORDS[:i]), (WORDS[i - 1], " ".join(WORDS[i:])))
            for i in range(1, 9)
        ]
        formatter = InputFormatter(self.tokenizer)
        batches = ExampleBatches(
            Examples(examples, seed=0, hard_negatives=2), formatter, formatter, TextGroup(runtime, 2), length=40
        )
        torch.manual_seed(2)
        losses = doubled(ContrastiveLosses(runtime, temperature=0.1, similarity="cosine", projection=projection))
        return Objective("contrastive", batches, losses, {"contrastive": config})

    def step(self, *objectives, step=0):
        """Return the result of a step and the gradient of every parameter."""
        module = TrainingModule(self.model, {objective.name: objective.losses for objective in objectives})
        module.zero_grad(set_to_none=True)
        result = run_step(module, list(objectives), StepData(list(objectives), steps=9)[step])
        return result, gradients_of(module)


def gradients_of(module):
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}


@pytest.fixture
def workshop(tokenizer, ids_of, double):
    return Workshop(tokenizer, ids_of(*LENGTHS))


def assert_equal_gradients(one, other, tolerance=1e-10):
    assert one.keys() == other.keys()
    assert sum(gradient.abs().max() > 1e-6 for gradient in one.values()) > 5
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=tolerance, atol=tolerance)


class TestParts:
    @pytest.mark.parametrize("micro", [1, 2, 3])
    @pytest.mark.parametrize("kind", ["hybrid", "unimae"])
    def test_token_losses_of_unequal_parts(self, workshop, kind, micro):
        build = getattr(workshop, kind)
        whole, gradients = workshop.step(build())
        parts, own = workshop.step(build(micro=micro))
        assert_equal_gradients(own, gradients)
        assert whole.losses.keys() == parts.losses.keys()
        for name in whole.losses:
            torch.testing.assert_close(parts.losses[name], whole.losses[name], rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(parts.total, whole.total, rtol=1e-11, atol=1e-11)
        assert whole.tokens == parts.tokens >= 90

    @pytest.mark.parametrize("kind", ["hybrid", "unimae"])
    def test_it_is_the_mean_over_the_tokens_of_the_step(self, workshop, kind):
        objective = getattr(workshop, kind)()
        result, gradients = workshop.step(objective)
        batch = objective.batches.make(0, 0, 6)
        sums, counts = objective.losses(workshop.model, batch), objective.losses.counts(batch)
        loss = sum(objective.weights(0)[name] * sums[name] / counts[name] for name in sums)
        module = TrainingModule(workshop.model, {objective.name: objective.losses})
        module.zero_grad(set_to_none=True)
        loss.backward()
        assert_equal_gradients(gradients, gradients_of(module))
        torch.testing.assert_close(result.total, loss.detach(), rtol=1e-11, atol=1e-11)

    @pytest.mark.parametrize("micro", [None, 1, 2, 3])
    @pytest.mark.parametrize("projection", [None, 5])
    def test_contrastive_parts_are_the_whole_batch(self, workshop, micro, projection):
        objective = workshop.contrastive(micro=micro, projection=projection)
        result, gradients = workshop.step(objective)
        batch = objective.batches.make(0, 0, 6)
        losses = objective.losses
        loss, right = losses.compare(
            torch.cat([losses(workshop.model, own) for own in batch.values()]), batch, gather=False
        )
        module = TrainingModule(workshop.model, {"contrastive": losses})
        module.zero_grad(set_to_none=True)
        loss.backward()
        assert_equal_gradients(gradients, gradients_of(module))
        torch.testing.assert_close(result.losses["contrastive"], loss.detach(), rtol=1e-11, atol=1e-11)
        assert result.losses["contrastive_accuracy"].item() == pytest.approx(right / 6)

    @pytest.mark.parametrize("made, count", [([[20]], 0), ([[20], [20, 21]], 1)])
    def test_a_step_with_nothing_to_predict(self, workshop, made, count):
        """A tokenizer with BOS: a single token is masked but no span fits, so msg has nothing."""
        workshop.rows = made
        result, gradients = workshop.step(workshop.hybrid(micro=1))
        assert result.losses["msg"].item() == 0.0
        assert result.losses["mntp"].item() > 0.0
        assert all(torch.isfinite(gradient).all() for gradient in gradients.values())
        result, gradients = workshop.step(workshop.hybrid(mntp=0.0))
        assert result.total.item() == 0.0
        assert not any(gradient.any() for gradient in gradients.values())


class TestWeights:
    def test_a_sum_of_losses_has_the_sum_of_their_gradients(self, workshop):
        kinds = {
            "hybrid": {"mntp": 0.7, "msg": 2.5},
            "unimae": {"weight": 3.0, "alpha": 0.2},
            "contrastive": {"weight": 9.0},
        }
        result, gradients = workshop.step(*(getattr(workshop, kind)(**weights) for kind, weights in kinds.items()))
        singles = [
            (0.7, "mntp", workshop.hybrid(mntp=1.0, msg=0.0)),
            (2.5, "msg", workshop.hybrid(mntp=0.0, msg=1.0)),
            (3.0 * 0.2, "mar", workshop.unimae(alpha=1.0)),
            (3.0, "mrc", workshop.unimae(alpha=0.0)),
            (9.0, "contrastive", workshop.contrastive()),
        ]
        # Alone, mar still has mrc beside it: what mrc brings is taken off.
        alone = {name: workshop.step(objective) for _, name, objective in singles}
        without = {name: values[1] for name, values in alone.items()}
        without["mar"] = {key: value - without["mrc"][key] for key, value in without["mar"].items()}
        total = 0.0
        for weight, name, _ in singles:
            torch.testing.assert_close(result.losses[name], alone[name][0].losses[name], rtol=1e-11, atol=1e-11)
            total += weight * result.losses[name]
        torch.testing.assert_close(result.total, total, rtol=1e-11, atol=1e-11)
        expected = {
            key: sum(weight * without[name][key] for weight, name, _ in singles if key in without[name])
            for key in gradients
        }
        assert_equal_gradients(gradients, expected)

    def test_schedules_switch_on_their_step(self, workshop):
        hybrid = workshop.hybrid(mntp=[[0, 1], [3, 0]], msg=[[0, 0], [2, 4]])
        contrastive = workshop.contrastive(weight=[[0, 0], [2, 9]])
        found = [(hybrid.weights(step), contrastive.weights(step)) for step in range(5)]
        assert [weights["mntp"] for weights, _ in found] == [1, 1, 1, 0, 0]
        assert [weights["msg"] for weights, _ in found] == [0, 0, 4, 4, 4]
        assert [weights["contrastive"] for _, weights in found] == [0, 0, 9, 9, 9]
        assert [contrastive.is_active(step) for step in range(5)] == [False, False, True, True, True]
        assert workshop.unimae(weight=[[0, 2], [1, 5]], alpha=0.1).weights(1) == pytest.approx({"mar": 0.5, "mrc": 5})
        # The gradient of a step is that of its weights.
        for step, weights in [(1, {"mntp": 1.0, "msg": 0.0}), (2, {"mntp": 1.0, "msg": 4.0})]:
            assert_equal_gradients(
                workshop.step(hybrid, step=step)[1], workshop.step(workshop.hybrid(**weights), step=step)[1]
            )

    def test_an_objective_with_weight_0_does_not_run(self, workshop):
        class Untouchable(Batches):
            def make(self, step, first, count):
                raise AssertionError(f"step {step} asked for texts")

        idle = workshop.contrastive(weight=[[0, 0], [2, 9]])
        idle.batches = Untouchable()
        data = StepData([workshop.hybrid(), idle], steps=3)
        assert [set(data[step]) for step in range(2)] == [{"step", "mntp+msg"}] * 2
        with pytest.raises(AssertionError, match="step 2 asked"):
            data[2]
        passes = []
        handle = idle.losses.heads.register_forward_hook(lambda *_: passes.append(1))
        result, _ = workshop.step(workshop.hybrid(), idle)
        handle.remove()
        assert not passes
        assert set(result.losses) == {"mntp", "msg"}

    def test_processes_share_the_texts_of_a_step(self, workshop):
        objectives = [workshop.hybrid(), workshop.contrastive()]
        alone = StepData(objectives, steps=3)
        for processes in (2, 3):
            data = StepData(objectives, steps=3, processes=processes)
            assert len(data) == 3 * processes
            for step in range(3):
                items = [data[step * processes + rank] for rank in range(processes)]
                assert {item["step"] for item in items} == {step}
                texts = [row for item in items for row in rows_of(item["mntp+msg"])]
                assert texts == rows_of(alone[step]["mntp+msg"])
                for group in ("query", "positive", "negative"):
                    texts = [row for item in items for row in rows_of(item["contrastive"][group])]
                    assert texts == rows_of(alone[step]["contrastive"][group])


def rows_of(batch):
    return [ids[own].tolist() for ids, own in zip(batch["input_ids"], batch["real"], strict=True)]


class TestValidation:
    @pytest.mark.parametrize("micro", [None, 2])
    def test_token_losses_are_means_over_all_batches(self, tokenizer, ids_of, double, micro):
        workshop = Workshop(tokenizer, ids_of(*LENGTHS), attn_pdrop=0.4, resid_pdrop=0.4)
        for objective in (workshop.hybrid(micro=micro), workshop.unimae(micro=micro)):
            dropped = workshop.step(objective)[0].losses
            module = TrainingModule(workshop.model, {objective.name: objective.losses}).eval()
            batches = [objective.batches.make(0, first, 6) for first in (0, 6)]
            found = evaluate_batches(module, objective, batches)
            one_by_one = [objective.losses(workshop.model, batch) for batch in batches]
            counts = [objective.losses.counts(batch) for batch in batches]
            assert counts[0] != counts[1]
            for name, value in found.items():
                total = sum(values[name].item() for values in one_by_one)
                assert value == pytest.approx(total / sum(count[name] for count in counts), rel=1e-11)
            # And they are what a step of training computes where nothing is dropped.
            first = evaluate_batches(module, objective, batches[:1])
            kept = workshop.step(objective)[0].losses
            for name, value in first.items():
                assert kept[name].item() == pytest.approx(value, rel=1e-11)
                assert dropped[name].item() != pytest.approx(value, rel=1e-4)
            workshop.model.train()

    @pytest.mark.parametrize("micro", [None, 2])
    def test_contrastive_is_the_mean_over_the_batches(self, workshop, micro):
        objective = workshop.contrastive(micro=micro)
        module = TrainingModule(workshop.model, {"contrastive": objective.losses}).eval()
        batches = [objective.batches.make(0, first, 6) for first in (0, 6)]
        found = evaluate_batches(module, objective, batches)
        steps = [workshop.step(objective, step=step)[0].losses["contrastive"].item() for step in (0, 1)]
        assert steps[0] != steps[1]
        assert found == {"contrastive": pytest.approx(sum(steps) / 2, rel=1e-11)}

    def test_nothing_to_predict_is_no_division_by_nothing(self, workshop):
        workshop.rows = [[20]]
        objective = workshop.hybrid()
        module = TrainingModule(workshop.model, {objective.name: objective.losses}).eval()
        found = evaluate_batches(module, objective, [objective.batches.make(0, 0, 6)])
        assert found["msg"] == 0.0
        assert found["mntp"] > 0.0
