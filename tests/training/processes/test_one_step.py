"""One step of every objective, in one process, in two and on a second device: the same losses and gradients."""

import pytest
import torch
import yaml
from safetensors.torch import load_file

from gerund.training.recipe import load_recipe
from tests.test_second_device import check_step
from tests.tiny import save_tiny
from tests.training.processes.one_of_two import one_step, work_steps
from tests.training.processes.recipes import STEPS, names_asked, steps_of
from tests.training.processes.starting import start_two


@pytest.fixture(scope="module")
def steps(request, paired_corpus, base, tmp_path_factory):
    """Take a step by each chosen recipe in one process, and in two that begin with the first one's weights."""
    asked = names_asked(request)
    folder = tmp_path_factory.mktemp("steps")
    teacher = save_tiny(folder / "teacher", "llama")
    expected = {}
    recipes = steps_of(paired_corpus, base, folder / "cache", teacher)
    for name in recipes.keys() & asked:
        content = recipes[name]
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**content, "output": str(folder / "out")}), "utf-8")
        expected[name] = one_step(load_recipe(path), 1)
    start_two(work_steps, folder)
    return folder, expected


@pytest.mark.slow
class TestOneStep:
    @pytest.mark.sweep(quick=0, check=6)
    @pytest.mark.parametrize("how", ["none", "fsdp2"])
    @pytest.mark.parametrize("name", STEPS)
    def test_equals_that_of_one_process(self, steps, name, how):
        """Losses and gradients, by DDP and FSDP2, whatever the other process began with."""
        folder, expected = steps
        one, two = expected[name], load_file(folder / f"{name}-{how}.safetensors")
        assert two.keys() == one.keys()
        scale = max(value.abs().max().item() for key, value in one.items() if key.startswith("gradient"))
        assert scale > 0
        for key, value in one.items():
            near = 1e-6 * (scale if key.startswith("gradient") else max(1.0, value.abs().item()))
            torch.testing.assert_close(two[key], value, rtol=0, atol=near, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize("recipe", STEPS)
def test_on_a_second_device(paired_corpus, base, tmp_path, recipe):
    teacher = save_tiny(tmp_path / "teacher", "llama")
    content = steps_of(paired_corpus, base, tmp_path / "cache", teacher)[recipe]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**content, "output": str(tmp_path / "out")}), "utf-8")
    check_step(load_recipe(tmp_path / "recipe.yaml"))
