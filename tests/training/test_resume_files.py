"""A run goes on only with the files of pairs, passages and vectors that it began with, which no token cache knows."""

import json
import re
import shutil

import numpy as np
import pytest

from gerund.errors import ConfigError
from gerund.training.corpus.texts import Sources
from gerund.training.objectives.base import prepare_objectives
from gerund.training.recipe import load_recipe
from gerund.training.run_folder import announce, check_resumable, check_same_data
from gerund.training.trainable_model import prepare_model
from tests.cli.helpers import run_cli
from tests.training.conftest import sentences
from tests.training.objectives.recipes import passage, text


def write_pairs(path, seed):
    rows = [
        {name: sentences(f"{seed}{name}{i}", 1) for name in ("query", "positive", "text_a", "text_b")}
        for i in range(16)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


def write_passages(path, seed):
    rng = np.random.default_rng(seed)
    rows = [passage(number, text(rng, 9), text(rng, 4)) for number in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")


@pytest.fixture
def settings(adapting, tmp_path):
    """Return a recipe that reads files in a folder of its own."""
    sizes = {"batch_size": 8, "length": 16}
    adapting["data"] = {"folder": str(tmp_path)}
    adapting["objectives"] = [{"kind": "contrastive", "pairs": {"files": ["pairs.jsonl"]}, **sizes}]
    write_pairs(tmp_path / "pairs.jsonl", 0)
    return {**adapting, "steps": 2, "save_steps": 2}


def test_other_pairs_under_the_same_name_are_refused(run, tmp_path):
    shutil.rmtree(run("out"))
    whole = (tmp_path / "pairs.jsonl").read_bytes()
    write_pairs(tmp_path / "pairs.jsonl", 1)
    with pytest.raises(ConfigError, match=r"the files in data\.folder have changed: pairs\.jsonl$"):
        run("out", "steps=4", resume=True)
    # The same content is enough, in another folder as well.
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "pairs.jsonl").write_bytes(whole)
    run("out", "steps=4", f"data.folder={tmp_path / 'moved'}", resume=True)


OBJECTIVES = {
    "gur": {"kind": "gur", "pairs": {"files": ["pairs.jsonl"]}},
    "sscl": {"kind": "sscl", "pairs": {"files": ["pairs.jsonl"]}},
    "rankgen": {
        "kind": "rankgen",
        "passages": ["passages"],
        "validation": ["held.jsonl"],
        "negatives": "inbook",
        "continuation_length": 16,
    },
    "distill": {"kind": "distill", "teacher": "vectors.parquet"},
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_every_objective_with_files_of_its_own_notes_them(settings, write_recipe, base, tmp_path, kind):
    settings["objectives"] = [{**OBJECTIVES[kind], "batch_size": 8, "length": 16}]
    passages = tmp_path / "passages"
    passages.mkdir()
    write_passages(passages / "part-00000.jsonl", 0)
    write_passages(tmp_path / "held.jsonl", 1)

    def embed(seed):
        (tmp_path / "texts.txt").write_text("\n".join(sentences(f"{seed}{i}", 1) for i in range(16)), "utf-8")
        vectors = tmp_path / "vectors.parquet"
        vectors.unlink(missing_ok=True)
        assert run_cli("embed", tmp_path / "texts.txt", "-m", base, "--keep-text", "-o", vectors).code == 0

    changes = {
        "pairs.jsonl": [lambda: write_pairs(tmp_path / "pairs.jsonl", 1)],
        # One document more, and another one.
        "passages": [
            lambda: write_passages(passages / "part-00001.jsonl", 2),
            lambda: write_passages(passages / "part-00000.jsonl", 3),
        ],
        "held.jsonl": [lambda: write_passages(tmp_path / "held.jsonl", 4)],
        "vectors.parquet": [lambda: embed(1)],
    }
    if kind == "distill":
        embed(0)
    recipe = load_recipe(write_recipe(settings))
    model = prepare_model(recipe, write=False)
    sources = Sources(recipe, model.tokenizer)
    prepare_objectives(recipe, model, sources)
    read = {"rankgen": ["held.jsonl", "passages"], "distill": ["vectors.parquet"]}.get(kind, ["pairs.jsonl"])
    assert sorted(sources.summary()["files"]) == read
    for name in read:
        for change in changes[name]:
            check_same_data(tmp_path, sources.summary(), resuming=False)
            check_same_data(tmp_path, sources.summary(), resuming=True)
            change()
            again = Sources(recipe, model.tokenizer)
            prepare_objectives(recipe, model, again)
            with pytest.raises(ConfigError, match=f"have changed: {name}$"):
                check_same_data(tmp_path, again.summary(), resuming=True)
            sources = again


def test_a_name_in_brackets_is_no_markup(capsys):
    announce("tokenising the training documents of wiki[en] and wiki[/en]")
    assert capsys.readouterr().err == "tokenising the training documents of wiki[en] and wiki[/en]\n"


def test_what_saves_memory_may_change_and_nothing_else(tmp_path, settings, write_recipe):
    settings["objectives"] = [{"kind": "mntp", "length": 16, "batch_size": 8}]
    settings["data"]["sources"] = [{"name": "a", "files": ["a.train.jsonl"]}]
    recipe = load_recipe(write_recipe(settings))
    (tmp_path / "recipe.json").write_text(json.dumps(recipe.plain()))
    less = ["objectives.mntp.micro_batch_size=2", "model.gradient_checkpointing=true"]
    check_resumable(load_recipe(write_recipe(settings), less), tmp_path, 0)
    for override, told in {
        "objectives.mntp.batch_size=4": "objectives.mntp.batch_size was 8 and is 4",
        "objectives.mntp.weight=2": "objectives.mntp.weight.0.1 was 1.0 and is 2.0",
        "model.lora.dropout=0.5": "model.lora.dropout was 0.0 and is 0.5",
        "encoder.prompt=Read": 'encoder.prompt was null and is "Read"',
        "objectives=[{kind: causal, length: 16, batch_size: 8}]": "objectives",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(f"since settings have changed: {told}")):
            check_resumable(load_recipe(write_recipe(settings), [override]), tmp_path, 0)


def test_files_of_an_objective_that_joins_in_later_are_new(tmp_path):
    caches = {"a training documents 0": [1, 2]}
    check_same_data(tmp_path, {**caches, "files": {"a": [1, "x"]}}, resuming=False)
    check_same_data(tmp_path, {**caches, "files": {"b": [2, "y"]}}, resuming=True)
    assert json.loads((tmp_path / "data.json").read_text("utf-8")) == {
        **caches,
        "files": {"a": [1, "x"], "b": [2, "y"]},
    }
    with pytest.raises(ConfigError, match=r"have changed: a, b$"):
        check_same_data(tmp_path, {**caches, "files": {"a": [1, "z"], "b": [2, "z"]}}, resuming=True)
    with pytest.raises(ConfigError, match=r"have changed$"):
        check_same_data(tmp_path, {"files": {"a": [1, "x"]}}, resuming=True)


def test_a_run_on_texts_alone_is_written_down_as_before(tmp_path):
    check_same_data(tmp_path, {"a training documents 0": [1, 2]}, resuming=False)
    check_same_data(tmp_path, {"a training documents 0": [1, 2]}, resuming=True)
    assert json.loads((tmp_path / "data.json").read_text("utf-8")) == {"a training documents 0": [1, 2]}
