"""A recipe is refused by name before anything starts."""

from pathlib import Path

import pytest

from gerund.errors import ConfigError
from gerund.training.recipe import load_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def test_reads_and_derives(settings, write_recipe):
    recipe = load_recipe(write_recipe(settings))
    assert (recipe.rows, recipe.accumulation) == (4, 2)
    assert recipe.data.sources[1].weight == 1.0
    assert recipe.optimizer.beta2 == 0.95


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_are_valid(path):
    load_recipe(path)


class TestOverrides:
    def test_dotted_keys_lists_and_yaml_values(self, settings, write_recipe):
        overrides = [
            "optimizer.learning_rate=1e-3",
            "data.sources.1.weight=0.5",
            "data.micro_batch_tokens=null",
            "compile=true",
            "model.config.rms_norm_eps=1e-5",
            "data.sources.0.files=[x.txt, y.txt]",
        ]
        recipe = load_recipe(write_recipe(settings), overrides)
        assert recipe.optimizer.learning_rate == 0.001
        assert recipe.data.sources[1].weight == 0.5
        assert (recipe.accumulation, recipe.compile) == (1, True)
        assert recipe.model.config["rms_norm_eps"] == 1e-5
        assert recipe.data.sources[0].files == [Path("x.txt"), Path("y.txt")]

    def test_section_that_the_file_leaves_out(self, settings, write_recipe):
        del settings["schedule"]
        assert load_recipe(write_recipe(settings), ["schedule.name=cosine"]).schedule.name == "cosine"

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("steps", "has not the form key=value"),
            ("=3", "has not the form key=value"),
            ("data.sources.7.weight=2", "'7' is no index of a list of 2"),
            ("data.sources.x=2", "'x' is no index of a list of 2"),
            ("steps.count=3", "'steps' has no fields"),
            ("steps=[1", "the value is not valid YAML"),
        ],
    )
    def test_malformed(self, settings, write_recipe, override, message):
        with pytest.raises(ConfigError, match=message):
            load_recipe(write_recipe(settings), [override])


class TestMistakes:
    @pytest.mark.parametrize(
        ("override", "message"),
        [
            (
                "optimiser.name=muon",
                r"recipe\.yaml: unknown field 'optimiser'; valid are: model, tokenizer, data, ",
            ),
            ("optimizer.lr=1", r"unknown field 'optimizer\.lr'; valid are: name, learning_rate"),
            ("data.sources.0.wait=1", r"unknown field 'data\.sources\.0\.wait'; valid are: name, files"),
            ("optimizer.name=sgd", r"optimizer\.name: input should be 'adamw' or 'muon'"),
            ("optimizer.learning_rate=-1", r"optimizer\.learning_rate: input should be greater than 0"),
            ("optimizer.learning_rate=.inf", r"optimizer\.learning_rate: input should be a finite number"),
            ("steps=many", r"steps: input should be a valid integer"),
            ("data.batch_tokens=100", "batch_tokens 100 is no multiple of"),
            (
                "data.micro_batch_tokens=60",
                r"micro_batch_tokens 60 is no multiple of data\.sequence_length 16",
            ),
            ("data.sequence_length=128", "sequences of 128 tokens exceed max_position_embeddings 64|is no multiple"),
            ("schedule.decay_steps=null", "decay_steps belongs to the schedule wsd, and wsd needs it"),
            ("schedule.name=cosine", "decay_steps belongs to the schedule wsd"),
            ("schedule.decay_sequence_length=48", "decay_sequence_length belongs to wsd, and must divide"),
            ("schedule={name: constant, decay_sequence_length: 32}", "decay_sequence_length belongs to wsd"),
            ("schedule.decay_sequence_length=128", "must divide|sequences of 128 tokens exceed"),
            ("steps=5", "warm-up and decay together are longer than steps 5"),
            ("save_steps=5", "save_steps 5 is no multiple of log_steps 2"),
            ("keep_checkpoints=1", "keep_checkpoints: input should be greater than or equal to 2"),
            ("data.sources.1.name=a", "data.sources has a name twice: a, a"),
            ("data.sources=[]", r"data\.sources: list should have at least 1 item"),
        ],
    )
    def test_refused_by_name(self, settings, write_recipe, override, message):
        with pytest.raises(ConfigError, match=message):
            load_recipe(write_recipe(settings), [override])

    def test_files(self, tmp_path):
        with pytest.raises(ConfigError, match="no such recipe"):
            load_recipe(tmp_path / "absent.yaml")
        for content, message in (
            ("a: [", "not valid YAML"),
            ("- 1", "a recipe is a mapping"),
            ("", "a mapping"),
        ):
            (tmp_path / "r.yaml").write_text(content, "utf-8")
            with pytest.raises(ConfigError, match=message):
                load_recipe(tmp_path / "r.yaml")
        (tmp_path / "r.yaml").write_bytes(b"\xff")
        with pytest.raises(ConfigError, match="cannot be read"):
            load_recipe(tmp_path / "r.yaml")
        with pytest.raises(ConfigError, match="cannot be read"):
            load_recipe(tmp_path)
