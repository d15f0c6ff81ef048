"""A recipe is found by name and refused by name; a user's own texts take the place of its texts."""

import json
import os
import socket
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from gerund.data.corpus import corpus_files
from gerund.data.yaml_text import parse_yaml
from gerund.errors import ConfigError
from gerund.training.recipe import bundled_recipes, find_recipe, load_recipe, recipes_by_purpose
from tests.cli.helpers import run_python


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
            ("objectives=[]", r"objectives: list should have at least 1 item"),
            ("objectives=[{kind: mntp, length: 16}, {kind: mntp}]", "objectives has a kind twice: mntp, mntp"),
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
            ("data={folder: a, folder: b}", "the value is not valid YAML"),
            ("data.sources=[]", "the objective causal reads texts, and data.sources has none"),
        ],
    )
    def test_refused_by_name(self, settings, write_recipe, override, message):
        with pytest.raises(ConfigError, match=message):
            load_recipe(write_recipe(settings), [override])

    @pytest.mark.parametrize(
        ("objective", "message"),
        [
            ("length: 3", r"objectives\.0: needs a kind, the name of an objective"),
            ("kind: mntp, length: 16, sources: [c]", "the objective mntp reads 'c'; data.sources has a, b"),
            (
                "kind: mntp, length: 16, mask_fraction: 0.95",
                "mask_fraction and random_fraction together are more than 1",
            ),
            ("kind: mntp, length: 16, min_words: 3", "min_words belongs to unit: sentences"),
            ("kind: msg, length: 16, shortest: 9, longest: 8", "shortest 9 is above longest 8"),
            ("kind: mntp, length: 16, weight: [[1, 1]]", r"begins with step 0 and rises, not \[1\]"),
            ("kind: mntp, length: 16, weight: [[0, 1], [0, 2]]", r"begins with step 0 and rises, not \[0, 0\]"),
            ("kind: mntp, length: 16, weight: [[0, 1], [6, 0]]", "no objective has a weight above 0 from step 6 on"),
            ("kind: mntp, length: 16, weight: -1", r"objectives\.0\.weight\.0\.1: input should be greater than or"),
            ("kind: unimae, length: 16", "unimae compresses a text into its end token's state, so the recipe needs"),
            ("kind: contrastive", r"objectives\.0\.pairs: field required"),
            (
                "kind: sscl, pairs: {fils: [a]}",
                r"unknown field 'objectives\.0\.pairs\.fils'; valid are: files, query, .*; did you mean 'files'\?$",
            ),
            (
                "kind: sscl, length: 16, pairs: {files: [a]}, crop: 0.5, min_words: 3, unit: sentences",
                "min_words, crop: this is about the recipe's texts, and pairs is read in their place",
            ),
            (
                "kind: distill, length: 16, teacher: a.parquet, unit: documents, sources: [c]",
                "sources, unit: this is about the recipe's texts, and teacher is read",
            ),
            ("kind: gen, length: 16, teacher: t, files: [a], min_words: 3", "min_words: this is about"),
            (
                "kind: late, length: 16, dimensions: 8, files: [a], questions: both, lists: 9",
                "questions, lists: this is about the recipe's texts, and files",
            ),
            (
                "kind: gur, length: 16, pairs: {files: [a]}, short_factor: 2",
                "short_factor is about batches of short pairs, which need short_length",
            ),
        ],
    )
    def test_objectives_refused_by_name(self, settings, write_recipe, objective, message):
        with pytest.raises(ConfigError, match=message):
            load_recipe(write_recipe(settings), [f"objectives=[{{{objective}}}]"])

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
from gerund.training.recipe import bundled_recipes, load_recipe
load_recipe({str(write_recipe(settings))!r})
for name in bundled_recipes():
    load_recipe(name)
heavy = ("torch", "transformers", "tokenizers", "pyarrow", "peft", "accelerate")
print(*[name for name in heavy if name in sys.modules])
"""
    assert run_python("-c", script).stdout.strip() == ""


def test_every_recipe_says_what_it_is():
    found = bundled_recipes()
    assert {"unimae-default", "magnet-llama-2-7b", "llm2vec-mntp-default", "default-base"} <= set(found)
    assert all(summary.endswith(".") for summary in found.values())


def test_every_recipe_has_one_purpose():
    by_purpose = recipes_by_purpose()
    names = [name for own in by_purpose.values() for name in own]
    assert sorted(names) == sorted(bundled_recipes())
    purposes = {name: purpose for purpose, own in by_purpose.items() for name in own}
    assert "Others" not in by_purpose
    assert purposes["rankgen-generator-llama-3.2-1b"] == purposes["default-base"] == "Make a language model"
    assert purposes["gur-unimae-default"].startswith("Embed, by pairs")
    assert purposes["unimae-causal-default"].startswith("Embed, by texts")
    assert purposes["gur-cl-default"] == "Make a language model"
    distilling = {name for name in names if name.startswith("distill-")} | {
        "align-default",
        "default-encoder",
        "smollm2-encoder",
    }
    assert set(by_purpose["Embed, as another model does (distillation)"]) == distilling


@pytest.mark.parametrize(("size", "batch"), [("base", 4096), ("large", 4096), ("xl", 1536)])
def test_rankgens_recipes_have_the_papers_settings(size, batch):
    """RankGen, appendix A.1 and Table 9; section 2.2."""
    recipe = load_recipe(f"rankgen-t5-{size}")
    [objective] = recipe.objectives
    assert (recipe.model.base, recipe.model.lora, recipe.encoder.pooling) == (f"google/t5-v1_1-{size}", None, "first")
    assert (objective.kind, objective.batch_size, objective.negatives) == ("rankgen", batch, "both")
    assert (objective.similarity, objective.temperature, objective.projection) == ("dot", 1.0, True)
    assert (recipe.optimizer.name, recipe.optimizer.learning_rate, recipe.optimizer.weight_decay) == (
        *("adafactor", 0.002, 0.0),
    )
    assert (recipe.schedule.name, recipe.schedule.warmup_steps, recipe.steps) == ("constant", 0, 100_000)


def test_rankgens_generator_learns_from_one_half_of_the_books():
    recipe = load_recipe("rankgen-generator-llama-3.2-1b")
    assert [source.part for source in recipe.data.sources] == ["1/2"]
    assert [objective.kind for objective in recipe.objectives] == ["causal"]
    with pytest.raises(ConfigError, match="part '2/1' is not written such as 1/2"):
        load_recipe("rankgen-generator-llama-3.2-1b", ["data.sources.books.part=2/1"])


def test_gurs_recipe_has_the_two_thresholds_of_the_paper():
    """Section IV-A: two Han characters for texts below 64, three for others; a Han character weighs 10."""
    [objective] = load_recipe("gur-small").objectives
    assert (objective.pairs.short_threshold, objective.pairs.threshold) == (20, 30)
    assert "--short-threshold 20 --short-characters 64" in find_recipe("gur-small").read_text("utf-8")


def test_magnets_losses_are_divided_as_in_equations_2_and_4():
    by_kind = {own.kind: own for own in load_recipe("magnet-llama-2-7b").objectives}
    assert by_kind["mntp"].normalisation == by_kind["msg"].normalisation == "paper"


def test_unimaes_supervised_recipe_has_instructions_and_batches_of_one_task():
    """Appendix D."""
    [objective] = load_recipe("unimae-supervised-llama-3.2-1b").objectives
    assert (objective.pairs.instruction, objective.same_task) == ("prompt", True)
    assert objective.query_prompt == "<instruct>{instruction}\n<query>"


def test_name_with_dots_is_a_name():
    assert load_recipe("llm2vec-mntp-sheared-llama-1.3b").steps == 1000


def test_default_may_be_left_out_of_a_name():
    assert find_recipe("align") == find_recipe("align-default")
    assert find_recipe("small-base").stem == "small-base"


def test_own_file_comes_before_a_name_inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("unimae-default").write_text("steps: 1")
    assert find_recipe("unimae-default") == Path("unimae-default")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("unimae-defalt", "unimae-defalt: no such recipe, .*did you mean unimae-default"),
        ("aling", r"aling: no such recipe, .*did you mean align-default\?$"),
        ("zzz", "`gerund recipes` lists those inside"),
        ("folder/unimae-default", "folder/unimae-default: no such recipe"),
        ("absent.yaml", "absent.yaml: no such recipe"),
    ],
)
def test_what_is_not_there_is_refused(recipe, message):
    with pytest.raises(ConfigError, match=message):
        load_recipe(recipe)


class TestOwnTexts:
    def test_take_the_place_of_the_sources(self, tmp_path):
        (tmp_path / "deep").mkdir()
        for name in ("b.txt", "a.jsonl.xz", "deep/c.parquet", "notes.md", ".hidden.txt"):
            (tmp_path / name).touch()
        recipe = load_recipe("magnet-default", ["data.sources.texts.limit=5"], texts=[tmp_path, tmp_path / "b.txt"])
        [source] = recipe.data.sources
        expected = ["a.jsonl.xz", "b.txt", "deep/c.parquet", "notes.md"]
        assert source.files == [tmp_path / name for name in expected]
        assert (source.limit, source.clean, source.validation) == (5, "none", [])
        assert recipe.data.validation_tokens == 16384

    @pytest.mark.parametrize(
        ("data", "message"),
        [
            ("[1]", "data: input should be a valid dictionary"),
            ("{sources: 5}", None),
            ("{sources: [{part: [1]}]}", "is not written such as 1/2"),
        ],
    )
    def test_in_a_recipe_whose_data_is_malformed(self, settings, write_recipe, corpus, data, message):
        settings["data"] = yaml.safe_load(data)
        with nullcontext() if message is None else pytest.raises(ConfigError, match=message):
            load_recipe(write_recipe(settings), texts=[corpus / "a.train.jsonl"])

    def test_a_name_that_is_no_utf8(self, settings, write_recipe, tmp_path):
        path = tmp_path / os.fsdecode(b"caf\xe9.txt")
        path.touch()
        recipe = load_recipe(write_recipe(settings), texts=[path])
        assert recipe.plain()["data"]["sources"][0]["files"] == [str(path)]
        assert json.loads(json.dumps(recipe.published()))["objectives"][0]["kind"] == "causal"

    def test_of_a_recipe_for_one_half_the_same_half_is_read(self, tmp_path):
        (tmp_path / "a.txt").touch()
        [source] = load_recipe("rankgen-generator-llama-3.2-1b", texts=[tmp_path]).data.sources
        assert (source.name, source.part) == ("texts", "1/2")

    def test_are_absolute_whatever_the_data_folder_is(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("a.txt").touch()
        assert corpus_files([Path("a.txt")]) == [tmp_path / "a.txt"]

    def test_missing_or_empty(self, tmp_path):
        with pytest.raises(ConfigError, match=r"absent: no such file or folder"):
            corpus_files([tmp_path / "absent"])
        with pytest.raises(ConfigError, match=r"no file of texts in it; their endings are \.jsonl"):
            corpus_files([tmp_path])

    @pytest.mark.parametrize("folder", ["/", "/proc", "/sys"])
    def test_the_files_of_the_whole_system_are_refused_at_once(self, folder):
        start = time.perf_counter()
        with pytest.raises(ConfigError, match=f"^{folder}: these are the files of the whole system; name a folder"):
            corpus_files([Path(folder)])
        assert time.perf_counter() - start < 1

    def test_a_link_to_the_whole_system_is_not_followed(self, tmp_path):
        (tmp_path / "all").symlink_to("/")
        (tmp_path / "a.txt").touch()
        assert corpus_files([tmp_path]) == [tmp_path / "a.txt"]
        with pytest.raises(ConfigError, match="the files of the whole system"):
            corpus_files([tmp_path / "all"])

    def test_sockets_and_pipes_are_no_texts(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)  # a socket's path is short
        os.mkfifo("pipe.txt")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("socket.txt")
            for name in ("pipe.txt", "socket.txt"):
                with pytest.raises(ConfigError, match=rf"{name}: neither a file nor a folder"):
                    corpus_files([Path(name)])
            with pytest.raises(ConfigError, match="no file of texts in it"):
                corpus_files([tmp_path])

    def test_what_cannot_be_read_is_said_before_anything_starts(self, tmp_path, monkeypatch):
        (tmp_path / "a.txt").touch()
        # Whoever runs the tests may be allowed to read everything.
        monkeypatch.setattr(os, "access", lambda path, mode: False)
        with pytest.raises(ConfigError, match=r"a\.txt: cannot be read \(permission denied\)"):
            corpus_files([tmp_path])

    def test_a_folder_that_cannot_be_read_is_not_passed_over(self, tmp_path, monkeypatch):
        def walk(folder, onerror):
            onerror(PermissionError(13, "Permission denied", str(tmp_path / "locked")))

        monkeypatch.setattr(os, "walk", walk)
        with pytest.raises(ConfigError, match=r"locked: cannot be read \(Permission denied\)"):
            corpus_files([tmp_path])

    @pytest.mark.parametrize("name", ["a" * 300, "nul\0.txt"])
    def test_impossible_paths(self, name):
        with pytest.raises(ConfigError, match="cannot be read"):
            corpus_files([Path(name)])

    def test_are_refused_where_pairs_are_read(self, tmp_path):
        (tmp_path / "a.txt").touch()
        with pytest.raises(ConfigError, match=r"unimae-supervised-default reads pairs, or .*, and no other texts"):
            load_recipe("unimae-supervised-default", texts=[tmp_path])

    @pytest.mark.parametrize("inside", ["", "runs/mine"])
    def test_are_not_written_into(self, tmp_path, inside):
        (tmp_path / "a.txt").touch()
        with pytest.raises(ConfigError, match="lies in the texts' folder"):
            load_recipe("unimae-default", [f"output={tmp_path / inside}"], texts=[tmp_path])
        load_recipe("unimae-default", [f"output={tmp_path}-out"], texts=[tmp_path])


def test_printed_recipe_is_a_recipe(tmp_path):
    copy = tmp_path / "mine.yaml"
    copy.write_text(find_recipe("unimae-default").read_text("utf-8"), "utf-8")
    assert load_recipe(copy) == load_recipe("unimae-default")
    assert yaml.safe_load(copy.read_text("utf-8"))["model"]["base"] == "default"
