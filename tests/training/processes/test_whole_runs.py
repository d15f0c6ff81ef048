"""Two processes train what one trains, leave one log and one set of files, and resume exactly."""

import json

import pytest
import torch
import yaml

from gerund.training.recipe import load_recipe
from gerund.training.run import train
from gerund.training.run_folder import newest_checkpoint
from gerund.training.sharding import OPTIMIZER, WEIGHTS, Stored
from tests.training.outcomes import assert_equal_states, read_log, state
from tests.training.processes.one_of_two import carry_out
from tests.training.processes.recipes import names_asked, recipes
from tests.training.processes.starting import run_two

# The causal recipe by shards: to its end, gone on with by one process, and begun by one.
SHARDS = ("shards", "two-then-one", "one-then-two")


@pytest.fixture(scope="module")
def compared(request, paired_corpus, base, tmp_path_factory):
    """Train in two processes; return the folder of all trainings, and what stopped the two in each."""
    asked = names_asked(request)
    folder = tmp_path_factory.mktemp("processes")
    files = {}
    for name, content in recipes(paired_corpus, base, folder / "cache").items():
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump({**content, "output": "out"}), "utf-8")

    def job(name, output, *more, **options):
        return {"recipe": str(files[name]), "overrides": [f"output={folder / output}", *more], **options}

    jobs = [job("dropout", "whole"), job("dropout", "broken", crash=2), job("dropout", "broken", resume=True)]
    jobs += [job("hybrid", "refused-mntp", "objectives.mntp.batch_size=3", "objectives.mntp.micro_batch_size=null")]
    jobs += [job("causal", "refused-causal", "objectives.causal.batch_size=6")]
    if asked:
        cut = "sharding=fsdp2"
        jobs += [job("causal", "shards", cut), job("causal", "two-then-one", cut, crash=2)]
        carry_out(**job("causal", "one-then-two"), crash=2)
        jobs += [job("causal", "one-then-two", cut, resume=True)]
    stopped = run_two(folder / "results", jobs)
    if asked:
        train(load_recipe(files["causal"], [f"output={folder / 'one'}"]))
        train(load_recipe(files["causal"], [f"output={folder / 'two-then-one'}"]), resume=True)
    return folder, dict(zip([job["overrides"][0].rpartition("/")[2] for job in jobs], stopped, strict=True))


@pytest.mark.slow
class TestResume:
    def test_is_exact_in_two_processes(self, compared):
        folder, stopped = compared
        assert stopped["broken"] == (None, None)  # the second time; what the first one left is compared
        assert_equal_states(folder / "whole", folder / "broken")
        assert any("decoder" in name for name in state(folder / "whole"))
        logs = [
            [{k: v for k, v in row.items() if k.startswith(("loss", "val", "grad", "tok"))} for row in read_log(path)]
            for path in (folder / "whole", folder / "broken")
        ]
        for row in [*logs[0], *logs[1]]:
            row.pop("tokens_per_second", None)
        assert logs[0] == logs[1]

    def test_each_process_has_its_random_state_in_the_checkpoint(self, compared):
        checkpoint = compared[0] / "whole/checkpoints/checkpoint-4"
        listed = json.loads((checkpoint / "manifest.json").read_text())
        assert {"rng_state_0.pth", "rng_state_1.pth"} <= listed.keys()
        assert listed.keys() | {"manifest.json"} == {path.name for path in checkpoint.iterdir()}
        # Each drops out other units: the same ones on other texts would be half the noise.
        states = [torch.load(checkpoint / f"rng_state_{rank}.pth", weights_only=False)["cpu"] for rank in range(2)]
        assert not torch.equal(*states)


@pytest.mark.full
class TestShards:
    """Whole trainings whose weights, gradients and optimizer are cut in two."""

    @pytest.mark.parametrize("name", SHARDS)
    def test_weights_are_those_of_one_process(self, compared, name):
        folder, stopped = compared
        assert stopped[name] == (("CrashError",) * 2 if name == "two-then-one" else (None, None))
        one, two = weights_of(folder / "one"), weights_of(folder / name)
        assert two.keys() == one.keys()
        for key, tensor in one.items():
            torch.testing.assert_close(two[key], tensor, rtol=1e-4, atol=2e-6)
        one, two = (read_log(folder / which) for which in ("one", name))
        assert [row["step"] for row in two] == [row["step"] for row in one]

    @pytest.mark.parametrize("name", SHARDS[:1])
    def test_each_process_writes_its_rows(self, compared, name):
        checkpoint = compared[0] / name / "checkpoints/checkpoint-4"
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
