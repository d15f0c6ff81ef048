"""Recipes are found by name, and a user's own texts take the place of theirs."""

import json
import os
import re
import socket
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from gerund.data.corpus import corpus_files
from gerund.errors import ConfigError
from gerund.training.recipe import bundled_recipes, find_recipe, load_recipe, recipes_by_purpose


def test_every_recipe_says_what_it_is():
    found = bundled_recipes()
    assert {"unimae-default", "magnet-llama-2-7b", "llm2vec-mntp-default", "default-base"} <= set(found)
    assert all(summary.endswith(".") for summary in found.values())


def test_every_recipe_says_first_what_it_is_for_and_last_in_brackets_by_whose_method():
    found = bundled_recipes()
    purposes = {"Embed", "Fill", "Find", "Read", "Score", "Search", "Write"}
    assert {re.match(r"\w+", summary)[0] for summary in found.values()} == purposes
    papers = {"unimae": "UniMAE", "magnet": "MAGNET", "rankgen": "RankGen", "gur": "GUR", "llm2vec": "LLM2Vec"}
    for name, summary in found.items():
        paper = papers.get(name.partition("-")[0], "")
        assert paper in summary, name
        assert not summary.startswith(("UniMAE", "MAGNET", "RankGen", "GUR", "LLM2Vec", "Distillation"))
    assert found["unimae-llama-3.2-1b"].endswith("(UniMAE, Appendix C.2).")


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
