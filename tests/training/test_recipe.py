"""A recipe is refused by name before anything starts."""

import subprocess
import sys
from pathlib import Path

import pytest

from gerund.data.yaml_text import parse_yaml
from gerund.errors import ConfigError
from gerund.training.recipe import bundled_recipes, load_recipe


def test_reads_and_derives(settings, write_recipe):
    recipe = load_recipe(write_recipe(settings))
    assert recipe.batch_tokens == 128
    assert recipe.objectives[0].weight_at(3) == 1.0
    assert recipe.data.sources[1].weight == 1.0
    assert recipe.optimizer.beta2 == 0.95


@pytest.mark.parametrize("name", bundled_recipes())
def test_bundled_recipes_are_valid(name):
    load_recipe(name)


class TestOverrides:
    def test_dotted_keys_lists_and_yaml_values(self, settings, write_recipe):
        overrides = [
            "optimizer.learning_rate=1e-3",
            "data.sources.1.weight=0.5",
            "objectives.causal.micro_batch_size=null",
            "data.sources.a.weight=3",
            "compile=true",
            "model.config.rms_norm_eps=1e-5",
            "data.sources.0.files=[x.txt, y.txt]",
        ]
        recipe = load_recipe(write_recipe(settings), overrides)
        assert recipe.optimizer.learning_rate == 0.001
        assert recipe.data.sources[1].weight == 0.5
        assert (recipe.objectives[0].micro_batch_size, recipe.compile) == (None, True)
        assert recipe.data.sources[0].weight == 3
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
            ("data.sources.²=2", "'²' is no index of a list of 2"),
            (f"data.sources.{'1' * 4301}=2", "is no index of a list of 2"),
            ("data.sources.x=2", "'x' is no index of a list of 2"),
            ("steps.count=3", "'steps' has no fields"),
            ("steps=[1", "the value is not valid YAML"),
            ("output=2024-13-01", "the value is not valid YAML"),
            (f"steps={'1' * 4301}", "the value is not valid YAML"),
            (f"steps=0x{'f' * 4000}", "the value is not valid YAML"),
            ("output=!!timestamp x", "the value is not valid YAML"),
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
                r"recipe\.yaml: unknown field 'optimiser'; valid are: model, tokenizer, encoder, data, ",
            ),
            ("optimizer.lr=1", r"unknown field 'optimizer\.lr'; valid are: name, learning_rate"),
            ("data.sources.0.wait=1", r"unknown field 'data\.sources\.0\.wait'; valid are: name, files"),
            ("optimizer.name=sgd", r"optimizer\.name: input should be 'adamw', 'muon' or 'adafactor'"),
            ("optimizer.learning_rate=-1", r"optimizer\.learning_rate: input should be greater than 0"),
            ("optimizer.learning_rate=.inf", r"optimizer\.learning_rate: input should be a finite number"),
            ("steps=many", r"steps: input should be a valid integer"),
            ("objectives.causal.batch_size=7", r"batch_size 7 is no multiple of micro_batch_size 4"),
            ("objectives.causal.length=128", "texts of 128 tokens exceed max_position_embeddings 64"),
            ("objectives.causal.foo=1", r"unknown field 'objectives\.0\.foo'; valid are: weight, batch_size"),
            ("objectives.0.kind=mlm", r"objectives\.0: unknown kind 'mlm'; valid are: 'causal', 'mntp', 'msg', "),
            ("objectives=[{length: 3}]", r"objectives\.0: needs a kind, the name of an objective"),
            ("objectives=[]", r"objectives: list should have at least 1 item"),
            ("objectives=[{kind: mntp, length: 16}, {kind: mntp}]", "objectives has a kind twice: mntp, mntp"),
            (
                "objectives=[{kind: mntp, length: 16, sources: [c]}]",
                "the objective mntp reads 'c'; data.sources has a, b",
            ),
            (
                "objectives=[{kind: mntp, length: 16, mask_fraction: 0.95}]",
                "mask_fraction and random_fraction together are more than 1",
            ),
            ("objectives=[{kind: mntp, length: 16, min_words: 3}]", "min_words belongs to unit: sentences"),
            ("objectives=[{kind: msg, length: 16, shortest: 9, longest: 8}]", "shortest 9 is above longest 8"),
            ("objectives=[{kind: mntp, length: 16, weight: [[1, 1]]}]", r"begins with step 0 and rises, not \[1\]"),
            (
                "objectives=[{kind: mntp, length: 16, weight: [[0, 1], [0, 2]]}]",
                r"begins with step 0 and rises, not \[0, 0\]",
            ),
            (
                "objectives=[{kind: mntp, length: 16, weight: [[0, 1], [6, 0]]}]",
                "no objective has a weight above 0 from step 6 on",
            ),
            (
                "objectives=[{kind: mntp, length: 16, weight: -1}]",
                r"objectives\.0\.weight\.0\.1: input should be greater than or",
            ),
            (
                "objectives=[{kind: unimae, length: 16}]",
                "unimae compresses a text into its end token's state, so the recipe needs",
            ),
            ("objectives=[{kind: contrastive}]", r"objectives\.0\.pairs: field required"),
            (
                "objectives=[{kind: sscl, pairs: {fils: [a]}}]",
                r"unknown field 'objectives\.0\.pairs\.fils'; valid are: files, query, .*; did you mean 'files'\?$",
            ),
            ("encoder.pooling=class", r"encoder.pooling: unknown pooling 'class'; valid are: mean"),
            ("encoder.atention=bidir", r"unknown field 'encoder\.atention'; valid are: attention, k, k0"),
            ("model.base=x", "a model has either a base or a config"),
            ("model.lora={rank: 3}", "lora adapts a base"),
            ("optimizer.head_learning_rate=1", "head_learning_rate belongs to adamw"),
            ("report_to=[mlflow]", r"report_to\.0: input should be 'tensorboard', 'wandb' or 'trackio'"),
            ("schedule.decay_steps=null", "decay_steps belongs to the schedule wsd, and wsd needs it"),
            ("schedule.name=cosine", "decay_steps belongs to the schedule wsd"),
            ("objectives.causal.decay_length=48", "decay_length 48 does not divide the 128 tokens of a batch"),
            ("objectives.causal.decay_length=128", "texts of 128 tokens exceed"),
            ("steps=5", "warmup_steps 2 and decay_steps 4 together are longer than steps 5"),
            ("save_steps=5", "save_steps 5 is no multiple of log_steps 2"),
            ("keep_checkpoints=1", "keep_checkpoints: input should be greater than or equal to 2"),
            ("data.sources.1.name=a", "data.sources has a name twice: a, a"),
            ("schedule={name: constant, floor: 0.1}", "schedule.floor is what is left at the end of a fall"),
            ("tokenizer.path=default", "max_length, vocab_size: this is about a tokenizer that is trained"),
            (
                "objectives=[{kind: sscl, length: 16, pairs: {files: [a]}, crop: 0.5, min_words: 3, unit: sentences}]",
                "min_words, crop: this is about the recipe's texts, and pairs is read in their place",
            ),
            (
                "objectives=[{kind: distill, length: 16, teacher: a.parquet, unit: documents, sources: [c]}]",
                "sources, unit: this is about the recipe's texts, and teacher is read",
            ),
            ("objectives=[{kind: gen, length: 16, teacher: t, files: [a], min_words: 3}]", "min_words: this is about"),
            (
                "objectives=[{kind: late, length: 16, dimensions: 8, files: [a], questions: both, lists: 9}]",
                "questions, lists: this is about the recipe's texts, and files",
            ),
            (
                "objectives=[{kind: gur, length: 16, pairs: {files: [a]}, short_factor: 2}]",
                "short_factor is about batches of short pairs, which need short_length",
            ),
            ("data={folder: a, folder: b}", "the value is not valid YAML"),
            ("data.sources=[]", "the objective causal reads texts, and data.sources has none"),
        ],
    )
    def test_refused_by_name(self, settings, write_recipe, override, message):
        with pytest.raises(ConfigError, match=message):
            load_recipe(write_recipe(settings), [override])

    def test_vectors_with_skips_are_not_what_unimae_trains(self, settings, write_recipe):
        encoder = "encoder={attention: causal, pooling: last, append_eos: true, skips: 2}"
        with pytest.raises(ConfigError, match="unimae trains states without skips"):
            load_recipe(write_recipe(settings), ["objectives=[{kind: unimae, length: 16}]", encoder])

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "content", ["[" * 100_000, "{a: " * 100_000, "- " * 5_000, "model: " + "[" * 65 + "]" * 65]
    )
    def test_nested_without_end(self, tmp_path, settings, write_recipe, content):
        (tmp_path / "deep.yaml").write_text(content)
        with pytest.raises(ConfigError, match=r"deep\.yaml: not valid YAML \(nested more than 64 levels deep\)"):
            load_recipe(tmp_path / "deep.yaml")
        with pytest.raises(ConfigError, match="the value is not valid YAML"):
            load_recipe(write_recipe(settings), ["model.config=" + "[" * 100_000])

    def test_a_key_that_is_given_twice(self, tmp_path):
        (tmp_path / "twice.yaml").write_text("steps: 5\nmodel: {base: a}\nsteps: 6\n")
        with pytest.raises(ConfigError, match=r"twice\.yaml: not valid YAML \('steps' is given twice .* line 3"):
            load_recipe(tmp_path / "twice.yaml")
        assert parse_yaml("a: &a {b: 1, c: 3}\nd: {<<: *a, b: 2}") == {"a": {"b": 1, "c": 3}, "d": {"b": 2, "c": 3}}
        nested = "a: &a {x: 1}\nb:\n  c: &c\n    <<: *a\n    x: 2\nd:\n  <<: *c\n  y: 3"
        assert parse_yaml(nested)["d"] == {"x": 2, "y": 3}
        assert parse_yaml("1: a\n'1': b") == {1: "a", "1": "b"}

    def test_files(self, tmp_path):
        with pytest.raises(ConfigError, match="no such recipe"):
            load_recipe(tmp_path / "absent.yaml")
        for content, message in (
            ("a: [", "not valid YAML"),
            ("a: 2024-13-01", "not valid YAML"),
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


@pytest.mark.slow
def test_a_recipe_is_read_without_torch(settings, write_recipe):
    script = f"""
import sys
from gerund.training.recipe import load_recipe
from gerund.training.recipe import bundled_recipes
load_recipe({str(write_recipe(settings))!r})
for name in bundled_recipes():
    load_recipe(name)
heavy = ("torch", "transformers", "tokenizers", "pyarrow", "peft", "accelerate")
print(*[name for name in heavy if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
