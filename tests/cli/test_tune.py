"""`gerund tune`: the plan that wins on validation data, and a folder that is read with it."""

import json

import pytest

import gerund
from gerund import EncoderConfig
from gerund.models.saved_settings import read_saved
from tests.cli.helpers import run_cli
from tests.evaluation.tables import write_data

MEASURES = ["lift", "mixed", "likelihood", "vectors"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.mark.slow
def test_what_wins_is_written_and_can_be_loaded(tiny_folder, data, tmp_path):
    out, encoder = tmp_path / "tuned", tmp_path / "encoder"
    # Templates leave no room for texts in a context as short as this model's.
    arguments = ["tune", tiny_folder, "--data", data, "--tasks", "sts/small", "--budget", 12, "-o", out]
    arguments += ["--methods", "skips,layers"]
    ran = run_cli(*arguments, "--save", encoder, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    trials = told["trials"]
    assert told["passes"] <= 12
    assert len(trials) > told["passes"]
    assert told["chosen"]["mean"] == max(trial["mean"] for trial in trials)
    lm = gerund.load(encoder)
    assert lm.encoder.attention.to_dict() == told["chosen"]["attention"]
    saved = read_saved(out)
    assert saved is not None
    assert saved.applied_to(EncoderConfig()) == lm.encoder
    assert json.loads((out / "gerund.json").read_text())["fingerprint"] == lm.fingerprint()
    assert "<img" in (out / "tuning.html").read_text()
    assert json.loads((out / "tuning.json").read_text()) == told
    again = run_cli(*arguments)
    assert again.code == 0, again.err
    assert told["chosen"]["label"] in again.out
    assert "gerund convert" in again.out
    as_named = run_cli(*arguments, "--budget", 2, "--adapter", "none", "--max-length", 30)
    assert " --adapter none --max-length 30 " in as_named.out


@pytest.mark.slow
def test_methods_without_training_are_tried_and_what_wins_is_saved(tiny_folder, data, tmp_path):
    sample = tmp_path / "texts.txt"
    sample.write_text("\n".join(f"{one} {other}" for one in "abcdefgh" for other in "stuvwxyz"), encoding="utf-8")
    out, encoder = tmp_path / "tuned", tmp_path / "encoder"
    few = ["--plans", "mask0-bidir", "--methods", "layers", "--sample", sample, "--budget", 24, "--max-length", 60]
    ran = run_cli(
        "tune", tiny_folder, "--data", data, "--tasks", "sts/small", *few, "-o", out, "--save", encoder, "--json"
    )
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    tried = {trial.get("transform", trial.get("layers", "")) for trial in told["trials"]}
    assert {"whitening", "whitening-16", "all-but-the-top", "all", "1+4", ""} <= tried
    lm = gerund.load(encoder)
    assert told["chosen"].get("transform", "none") == lm.encoder.transform
    assert json.loads((out / "gerund.json").read_text())["fingerprint"] == lm.fingerprint()
    lm.encode("a cat")  # a transform that won was saved with it


@pytest.mark.slow
def test_default_tasks_are_those_with_a_validation_split(tiny_folder, data, tmp_path):
    ran = run_cli(
        "tune", tiny_folder, "--data", data, "--methods", "skips", "--budget", 2, "-o", tmp_path / "t", "--json"
    )
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert set(told["chosen"]["scores"]) == {"sts/small", "classification/fruit"}
    assert told["config"]["split"] == "validation"


@pytest.mark.slow
def test_without_a_validation_split_there_is_a_warning(tiny_folder, data, tmp_path):
    ran = run_cli("tune", tiny_folder, "--data", data, "--tasks", "retrieval", "--budget", 2, "-o", tmp_path / "t")
    assert ran.code == 0, ran.err
    assert "warning: retrieval/small: no validation split, so the choice is made on the test set" in ran.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "perplexity"], "no plan improves the score of perplexity/small"),
        (["--tasks", "sts,retrieval"], "retrieval/small: no validation split, while sts/small has one"),
        (["--plans", "mask0"], "'mask0' does not say which layers: there are mask0-bidir, "),
        (["--plans", "MASK3-BIDIR"], "is named without numbers, and 'MASK3-BIDIR' says one; take 'mask0-bidir'"),
        (["--methods", "transforms", "--tasks", "sts"], "transforms are fitted on texts"),
        (["--pooling", "class", "--tasks", "sts"], "unknown pooling 'class'"),
        (["--save", "{data}", "--tasks", "sts"], "exists"),
    ],
)
def test_mistakes(tiny_folder, data, tmp_path, arguments, message):
    given = [argument.format(data=data) for argument in arguments]
    ran = run_cli("tune", tiny_folder, "--data", data, "-o", tmp_path / "t", *given)
    assert ran.code == 2, (ran.out, ran.err)
    assert message in ran.err
    assert not (tmp_path / "t").exists()


def test_a_folder_with_nothing_to_choose_on(tiny_folder, tmp_path):
    (tmp_path / "sts").mkdir()
    ran = run_cli("tune", tiny_folder, "--data", tmp_path, "-o", tmp_path / "t")
    assert "has no sts or classification task with a validation split" in ran.mistake


@pytest.mark.slow
def test_the_weight_of_a_fusion_is_chosen_written_and_found(tiny_folder, data, tmp_path):
    out, encoder = tmp_path / "fused", tmp_path / "encoder"
    arguments = ["tune", tiny_folder, "--data", data, "--tasks", "retrieval", "--fusion", "-o", out]
    ran = run_cli(*arguments, "--save", encoder, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert [one["weight"] for one in told["trials"]] == [place / 10 for place in range(11)]
    best = max(one["mean"] for one in told["trials"])
    tied = [one["weight"] for one in told["trials"] if one["mean"] == best]
    assert told["chosen"] == min(tied, key=lambda weight: abs(weight - 0.5))
    assert json.loads((out / "fusion.json").read_text()) == told
    lm = gerund.load(encoder)
    assert lm.encoder.fusion == told["chosen"]
    assert lm.fingerprint() == gerund.load(tiny_folder).fingerprint()  # no vector depends on it
    saved = read_saved(out)
    assert saved is not None
    assert saved.applied_to(EncoderConfig()).fusion == told["chosen"]
    # The same command again measures nothing.
    again = run_cli(*arguments)
    assert again.code == 0
    assert again.err.count("known already") == 11
    assert again.out.startswith(f"fusion {told['chosen']:g}: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "sts"], "the weight of a fusion is chosen on retrieval tasks, not on sts/small"),
        ([], "has no retrieval task with a validation split; give --tasks"),
        (["--tasks", "retrieval", "--plans", "causal"], "--plans is for a search for a plan"),
        (["--tasks", "retrieval", "--budget", 5], "--budget is for a search for a plan"),
    ],
)
def test_what_a_weight_is_not_chosen_by(tiny_folder, data, tmp_path, arguments, message):
    ran = run_cli("tune", tiny_folder, "--data", data, "--fusion", "-o", tmp_path / "t", *arguments)
    assert ran.code == 2
    assert message in ran.err


def test_the_measure_of_a_second_stage_is_chosen_written_and_found(tiny_folder, data, tmp_path):
    out, ranker = tmp_path / "ranked", tmp_path / "ranker"
    arguments = ["tune", tiny_folder, "--data", data, "--tasks", "retrieval", "--rerank", "--candidates", 3, "-o", out]
    ran = run_cli(*arguments, "--save", ranker, "--json")
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    tried = {by: [one["weight"] for one in told["trials"] if one["by"] == by] for by in MEASURES}
    assert tried == {by: [place / 10 for place in range(11)] for by in MEASURES}
    best = max(one["mean"] for one in told["trials"])
    tied = [(one["by"], one["weight"]) for one in told["trials"] if one["mean"] == best]
    assert (told["chosen"]["by"], told["chosen"]["weight"]) in tied
    lm = gerund.load(ranker)
    assert {"by": lm.encoder.rerank_by, "weight": lm.encoder.rerank_weight} == told["chosen"]
    assert lm.rerank("a", ["a", "b"], scores=[1, 2]).by == told["chosen"]["by"]
    assert lm.fingerprint() == gerund.load(tiny_folder).fingerprint()  # no vector depends on it
    # The same command again reads nothing, and goes on where one line was half written.
    kept = out / "scores" / "rerank.jsonl"
    with kept.open("a") as file:
        file.write('["half')
    lines = len(kept.read_text().splitlines()) - 1
    again = run_cli(*arguments)
    assert again.out.startswith(f"{told['chosen']['by']} {told['chosen']['weight']:g}: ")
    assert len(kept.read_text().splitlines()) == lines
    for more, words in (
        (["--fusion"], "choose different things"),
        (["--candidates", 1], "--candidates is for --rerank"),
    ):
        assert words in run_cli(*arguments, *more).mistake
