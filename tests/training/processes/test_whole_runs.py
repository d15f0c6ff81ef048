"""Two processes train what one trains, leave one log and one set of files, and resume exactly."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file

import gerund
from gerund.training.recipe import load_recipe
from gerund.training.run import train
from gerund.training.run_folder import newest_checkpoint
from gerund.training.sharding import OPTIMIZER, WEIGHTS, Stored
from tests.training.outcomes import assert_equal_states, read_log, state
from tests.training.processes.one_of_two import carry_out
from tests.training.processes.recipes import SAME, SHARDED, names_asked, recipes
from tests.training.processes.starting import run_two

# Trainings of the causal recipe that went on in another number of processes.
RESTARTED = ("two-then-one", "one-then-two")


@pytest.fixture(scope="module")
def compared(request, paired_corpus, base, tmp_path_factory):
    """Train the recipes of chosen tests in one process and in two; return both folders, and what stopped the two."""
    asked = names_asked(request)
    names = [name for name in SAME if name in asked or (name == "causal" and asked & {*RESTARTED})]
    folder = tmp_path_factory.mktemp("processes")
    files = {}
    for name, content in recipes(paired_corpus, base, folder / "cache").items():
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump({**content, "output": "out"}), "utf-8")

    def job(name, output, *more, **options):
        return {"recipe": str(files[name]), "overrides": [f"output={folder / output}", *more], **options}

    jobs = [job(name, f"two-{name}") for name in (*names, "dropout")]
    jobs += [job("dropout", "two-broken", crash=2), job("dropout", "two-broken", resume=True)]
    jobs += [job("hybrid", "refused-mntp", "objectives.mntp.batch_size=3", "objectives.mntp.micro_batch_size=null")]
    jobs += [job("causal", "refused-causal", "objectives.causal.batch_size=6")]
    # By shards: two trainings to their end, one that one process goes on with, and one that one process began.
    shards = "sharding=fsdp2"
    jobs += [job(name, f"shards-{name}", shards) for name in SHARDED if name in names]
    if "causal" in names:
        jobs += [job("causal", "two-then-one", shards, crash=2)]
        began = job("causal", "one-then-two")
        carry_out(**began, crash=2)
        jobs += [job("causal", "one-then-two", shards, resume=True)]
    stopped = run_two(folder / "results", jobs)
    for name in names:
        train(load_recipe(files[name], [f"output={folder / f'one-{name}'}"]))
    if "causal" in names:
        train(load_recipe(files["causal"], [f"output={folder / 'two-then-one'}"]), resume=True)
    return folder, dict(zip([job["overrides"][0].rpartition("/")[2] for job in jobs], stopped, strict=True))


# A step of each, in one process and in two, is compared by `make check`.
@pytest.mark.full
class TestSameAsOneProcess:
    @pytest.mark.parametrize("name", SAME)
    def test_weights(self, compared, name):
        folder = compared[0]
        one, two = (
            load_file(folder / f"{count}-{name}/checkpoints/checkpoint-4/trainable.safetensors")
            for count in ("one", "two")
        )
        assert one.keys() == two.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=2e-6)

    @pytest.mark.parametrize("name", SAME)
    def test_log_has_each_line_once_and_says_the_same(self, compared, name):
        folder = compared[0]
        one, two = (read_log(folder / f"{count}-{name}") for count in ("one", "two"))
        steps = [1, 2, 3, 4] if name in ("rankgen", "gur") else [1, 2, 2, 3, 4, 4]  # pairs have no validation
        assert [row["step"] for row in two] == [row["step"] for row in one] == steps
        for mine, other in zip(two, one, strict=True):
            timing = {"tokens_per_second", "seconds", "peak_memory_mib"}
            assert mine.keys() == other.keys()
            for key in mine.keys() - timing:
                assert mine[key] == pytest.approx(other[key], rel=1e-4), (mine["step"], key)
        for count in ("one", "two"):
            report = json.loads((folder / f"{count}-{name}/model/training.json").read_text())
            assert report["tokens"] == one[-1]["tokens"]

    @pytest.mark.parametrize("name", ["hybrid"])
    def test_the_objectives_of_the_log_take_turns(self, compared, name):
        """What the comparison would not see: an objective that never takes part in either."""
        rows = [row for row in read_log(compared[0] / f"two-{name}") if "loss" in row]
        seen = [{key.removeprefix("loss_") for key in row if key.startswith("loss_")} for row in rows]
        masked = {"mntp", "msg"}
        assert seen == [masked | {"causal"}, *[masked | {"simcse"}] * 2, {"simcse", "causal"}]


@pytest.mark.slow
class TestResume:
    def test_is_exact_in_two_processes(self, compared):
        folder, stopped = compared
        assert stopped["two-broken"] == (None, None)  # the second time; what the first one left is compared
        assert_equal_states(folder / "two-dropout", folder / "two-broken")
        assert any("decoder" in name for name in state(folder / "two-dropout"))
        logs = [
            [{k: v for k, v in row.items() if k.startswith(("loss", "val", "grad", "tok"))} for row in read_log(path)]
            for path in (folder / "two-dropout", folder / "two-broken")
        ]
        for row in [*logs[0], *logs[1]]:
            row.pop("tokens_per_second", None)
        assert logs[0] == logs[1]

    def test_each_process_has_its_random_state_in_the_checkpoint(self, compared):
        checkpoint = compared[0] / "two-dropout/checkpoints/checkpoint-4"
        listed = json.loads((checkpoint / "manifest.json").read_text())
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= listed.keys()
        assert listed.keys() | {"manifest.json"} == {path.name for path in checkpoint.iterdir()}
        # Each drops out other units: the same ones on other texts would be half the noise.
        states = [torch.load(checkpoint / f"rng_state_{rank}.pth", weights_only=False)["cpu"] for rank in range(2)]
        assert not torch.equal(*states)


@pytest.mark.full
class TestShards:
    """Whole trainings whose weights, gradients and optimizer are cut in two."""

    @pytest.mark.parametrize("name", [*SHARDED, *RESTARTED])
    def test_weights_are_those_of_one_process(self, compared, name):
        folder, stopped = compared
        sharded = f"shards-{name}" if name in SHARDED else name
        assert stopped[sharded] == (("CrashError",) * 2 if name == "two-then-one" else (None, None))
        one = weights_of(folder / f"one-{name if name in SHARDED else 'causal'}")
        two = weights_of(folder / sharded)
        assert two.keys() == one.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=2e-6)

    @pytest.mark.parametrize("name", SHARDED)
    def test_log_and_finished_model_are_those_of_one_process(self, compared, name):
        folder = compared[0]
        one, two = (read_log(folder / f"{how}-{name}") for how in ("one", "shards"))
        assert [row["step"] for row in two] == [row["step"] for row in one]
        for mine, other in zip(two, one, strict=True):
            for key in other.keys() - {"tokens_per_second", "seconds", "peak_memory_mib"}:
                assert mine[key] == pytest.approx(other[key], rel=1e-4), (mine["step"], key)
        one, two = (gerund.load(folder / f"{how}-{name}" / "model") for how in ("one", "shards"))
        ids = torch.arange(20)[None]
        with torch.no_grad():
            torch.testing.assert_close(two.model(ids).logits, one.model(ids).logits, rtol=0, atol=2e-2)
        assert float(one.encode("a cat") @ two.encode("a cat")) > 0.999

    @pytest.mark.parametrize("name", ["causal"])
    def test_each_process_writes_its_rows(self, compared, name):
        checkpoint = compared[0] / f"shards-{name}/checkpoints/checkpoint-4"
        listed = json.loads((checkpoint / "manifest.json").read_text())
        files = {f"{stem}-0000{rank}-of-00002.safetensors" for stem in (WEIGHTS, OPTIMIZER) for rank in (1, 2)}
        assert files <= listed.keys()
        assert not [name for name in listed if name.startswith("optimizer.pt")]
        sizes = [listed[name] for name in sorted(files)]
        assert max(sizes[:2]) < 1.1 * min(sizes[:2])  # half of the state each
        assert newest_checkpoint(checkpoint.parent)[0] == checkpoint
        (checkpoint / min(files)).rename(checkpoint / "elsewhere")
        assert newest_checkpoint(checkpoint.parent)[1] == {checkpoint: f"{min(files)} is missing"}
        (checkpoint / "elsewhere").rename(checkpoint / min(files))


def weights_of(folder):
    stored = Stored.open(folder / "checkpoints/checkpoint-4", WEIGHTS)
    return {name: stored.rows(name, 0, shape[0]) for name, shape in stored.shapes.items()}


@pytest.mark.slow
class TestMistakes:
    def test_batches_that_cannot_be_shared(self, compared):
        folder, stopped = compared
        assert stopped["refused-mntp"] == ("mntp: 2 processes cannot share a batch of 3",) * 2
        assert stopped["refused-causal"] == ("causal: 2 processes cannot share 3 blocks of the decay",) * 2
        assert not [path for path in folder.iterdir() if path.name.startswith("refused")]
