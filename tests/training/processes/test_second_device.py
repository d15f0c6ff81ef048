"""One step by every recipe on a second device: no tensor of it is made on the wrong one."""

import pytest
import yaml

from gerund.training.recipe import load_recipe
from tests.test_second_device import check_step
from tests.tiny import save_tiny
from tests.training.processes.recipes import STEPS, steps_of


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_of_every_objective(paired_corpus, base, tmp_path, name):
    teacher = save_tiny(tmp_path / "teacher", "llama")
    content = steps_of(paired_corpus, base, tmp_path / "cache", teacher)[name]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**content, "output": str(tmp_path / "out")}), "utf-8")
    check_step(load_recipe(tmp_path / "recipe.yaml"))
