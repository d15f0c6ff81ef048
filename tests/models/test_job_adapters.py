"""One adapter encodes, another fills in, a third scores, each as it would alone; writing is without any."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError, GerundError, ModelError
from gerund.models.adapters import Adapters, base_state, merged_state
from gerund.models.saved_settings import read_adapters
from gerund.scoring.dual_encoder import DualScorer, ScorerConfig
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.cli.helpers import run_cli
from tests.tiny import load, save_tiny

pytestmark = pytest.mark.filterwarnings(*PEFT_WARNINGS)

TEXTS = ["the cat", "a dog in the garden and another thing", "x"]
GAP = "In the end [blank] ran."
PREFIXES, CONTINUATIONS = ["the cat sat"], [[" in a tin", " then"]]
# A reranker is trained with a head of its own: tests/training/objectives/test_ranking.py.
JOBS = ("encode", "infill", "score")
# Layers that two of them change, layers that one does, and modules that one keeps whole.
ENCODE = {"target_modules": ["q_proj", "v_proj"], "r": 4}
INFILL = {"target_modules": ["q_proj", "down_proj"], "r": 2, "modules_to_save": ["lm_head"]}
SCORE = {"target_modules": ["v_proj", "up_proj"], "use_dora": True}


@pytest.fixture(scope="module")
def runs(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three trainings on the same weights, as a run leaves them."""
    room = tmp_path_factory.mktemp("runs")
    found = {}
    for job, settings in {"encode": ENCODE, "infill": INFILL, "score": SCORE}.items():
        plan = {"attention": "causal", "pooling": "last"} if job == "score" else {"attention": "bidir"}
        adapter = make_adapter(tiny_folder, room / f"{job}-lora", **settings)
        lm = gerund.load(tiny_folder, adapter=adapter, dtype="float32", **plan)
        if job == "score":
            projection = np.random.default_rng(0).normal(size=(lm.dimensions, lm.dimensions)).astype(np.float32)
            lm.scorer = DualScorer(lm, ScorerConfig(prefix="a "), projection)
        lm.save(room / job)
        found[job] = room / job
    return found


@pytest.fixture(scope="module")
def joined(runs: dict[str, Path]) -> gerund.LanguageModel:
    return gerund.load(runs["encode"], infill_adapter=runs["infill"], scorer=runs["score"], dtype="float32")


def logits(lm: gerund.LanguageModel) -> torch.Tensor:
    with torch.no_grad():
        return lm.model(torch.arange(3, 20)[None]).logits


@pytest.fixture(scope="module")
def expected(runs: dict[str, Path], tiny_folder: Path) -> dict:
    """What each run computes alone, and what the model computes without any."""
    infill, plain = load(runs["infill"]), load(tiny_folder)
    return {
        "encode": load(runs["encode"]).encode(TEXTS),
        "infill": infill.infill(GAP, lengths=[2, 3]),
        "spans": [model.span_logprobs("In the end", " a man", " ran.") for model in (infill, plain)],
        "score": load(runs["score"]).score(PREFIXES, CONTINUATIONS)[0],
        "logits": logits(plain),
    }


def check_all_jobs(lm: gerund.LanguageModel, expected: dict) -> None:
    """Compare each job with the run that was trained for it."""
    np.testing.assert_allclose(lm.encode(TEXTS), expected["encode"], atol=1e-6)
    assert lm.infill(GAP, lengths=[2, 3]) == expected["infill"]
    spans = lm.span_logprobs("In the end", " a man", " ran.")
    np.testing.assert_allclose(spans, expected["spans"][0], atol=1e-6)
    assert np.abs(spans - expected["spans"][1]).max() > 0.01
    assert lm.score(PREFIXES, CONTINUATIONS)[0] == pytest.approx(expected["score"])
    assert torch.equal(logits(lm), expected["logits"])


@pytest.mark.slow
def test_each_job_has_its_own(joined, expected):
    check_all_jobs(joined, expected)
    assert [joined.adapters.name(job) for job in JOBS] == list(JOBS)


@pytest.mark.slow
def test_saved_and_loaded_again(joined, runs, expected, tmp_path):
    joined.save(tmp_path / "all")
    again = load(tmp_path / "all")
    check_all_jobs(again, expected)
    assert again.fingerprint() == joined.fingerprint() == load(runs["encode"]).fingerprint()
    assert again.scorer is not None
    assert again.scorer.fingerprint == joined.scorer.fingerprint
    assert {path.name for path in (tmp_path / "all").glob("adapter*")} == {"adapter", "adapter-infill", "adapter-score"}


@pytest.mark.slow
def test_converted_by_the_command(runs, expected, tmp_path):
    out = tmp_path / "all"
    (runs["score"] / "training.json").write_text("{}")
    options = ("--infill-adapter", runs["infill"], "--scorer", runs["score"])
    done = run_cli("convert", runs["encode"], out, *options)
    assert done.code == 0, done.err
    check_all_jobs(load(out), expected)
    assert (out / "training-score.json").read_text() == "{}"
    assert not (out / "training-infill.json").exists()
    weights = "model.safetensors"
    assert (out / weights).read_bytes() == (runs["encode"] / weights).read_bytes()


@pytest.mark.slow
def test_merging_joins_nothing(runs, tmp_path):
    assert run_cli("convert", runs["encode"], tmp_path / "x", "--merge", "--scorer", "there").mistake
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_what_a_merged_folder_leaves_behind_is_told(joined, runs, tmp_path):
    joined.save(tmp_path / "all")
    warning = (
        "gerund: warning: its infilling adapter and its scorer fit the weights of before and are left out; the "
        "model now generates with the adapter that encodes, which may spoil its texts"
    )
    for command in (["convert", "--merge"], ["export", "--format", "merged"]):
        for model, told in ((tmp_path / "all", [warning]), (runs["encode"], [])):
            out = tmp_path / "-".join((command[0], model.name))
            done = run_cli(command[0], model, out, *command[1:])
            assert (done.code, done.err.splitlines()) == (0, told)


@pytest.mark.slow
def test_reports_go_with_their_adapters(joined, runs, tmp_path):
    joined.save(tmp_path / "all")
    reports = {"training.json", "training-infill.json", "training-score.json"}
    for name in (*reports, "training-base.json"):
        (tmp_path / "all" / name).write_text("{}")

    def kept(*options):
        assert run_cli("convert", tmp_path / "all", tmp_path / "out", "--force", *options).code == 0
        return {path.name for path in (tmp_path / "out").glob("training*.json")}

    assert kept() == kept("--attention", "causal") == {*reports, "training-base.json"}
    assert kept("--infill-adapter", "none") == {"training.json", "training-score.json", "training-base.json"}
    assert kept("--adapter", "none") == {"training-base.json"}
    # It does every job then.
    assert kept("--adapter", runs["infill"] / "adapter") == {"training-infill.json", "training-base.json"}


@pytest.mark.slow
def test_another_plan_for_an_adapter_is_told(runs, tmp_path):
    def told(*options):
        return run_cli("convert", runs["encode"], tmp_path / "out", "--force", *options).err.splitlines()

    assert told("--attention", "mask0-bidir") == [
        "gerund: warning: the adapter was trained under bidir; --adapter none leaves it aside"
    ]
    assert told() == told("--attention", "bidir") == told("--attention", "causal", "--adapter", "none") == []


@pytest.mark.slow
def test_a_scorer_with_its_own_reading_stays_under_every_plan(joined, runs, tmp_path):
    expected = load(runs["score"]).score(PREFIXES, CONTINUATIONS)[0]
    other = joined.with_encoder(gerund.EncoderConfig(pooling="weighted-mean"))
    assert other.score(PREFIXES, CONTINUATIONS)[0] == pytest.approx(expected)
    joined.save(tmp_path / "all")
    assert load(tmp_path / "all", attention="causal").score(PREFIXES, CONTINUATIONS)[0] == pytest.approx(expected)
    # One that reads as its encoder does goes with that alone.
    assert load(runs["score"], attention="bidir").scorer is None


def test_left_aside_all_are(joined, tiny_folder, tmp_path):
    joined.save(tmp_path / "all")
    lm, plain = load(tmp_path / "all", adapter="none"), load(tiny_folder, attention="bidir")
    assert lm.adapters.folders == {}
    assert lm.scorer is None
    np.testing.assert_array_equal(lm.encode(TEXTS), plain.encode(TEXTS))
    assert lm.infill(GAP, lengths=2) == plain.infill(GAP, lengths=2)
    assert lm.fingerprint() == plain.fingerprint() != joined.fingerprint()
    lm.save(tmp_path / "without")
    assert not list((tmp_path / "without").glob("adapter*"))
    np.testing.assert_array_equal(load(tmp_path / "without").encode(TEXTS), plain.encode(TEXTS))


@pytest.mark.slow
def test_without_one_a_job_is_the_untouched_models(runs, tiny_folder, tmp_path):
    load(runs["encode"], infill_adapter="none").save(tmp_path / "apart")
    lm, plain = load(tmp_path / "apart"), load(tiny_folder)
    assert lm.infill(GAP, lengths=2) == plain.infill(GAP, lengths=2)
    assert lm.adapters.name("infill") is None
    np.testing.assert_allclose(lm.encode(TEXTS), load(runs["encode"]).encode(TEXTS), atol=1e-6)


def test_a_bare_peft_folder_fills_in(runs, tiny_folder):
    lm = load(tiny_folder, infill_adapter=runs["infill"].parent / "infill-lora")
    assert lm.infill(GAP, lengths=2) == load(runs["infill"]).infill(GAP, lengths=2)
    np.testing.assert_array_equal(lm.encode(TEXTS), load(tiny_folder).encode(TEXTS))


def test_each_is_merged_alone(joined, runs):
    for job in JOBS:
        merged = merged_state(joined.model, joined.adapters.name(job))
        alone = merged_state(load(runs[job]).model, "encode")
        assert merged.keys() == alone.keys()
        assert all(torch.allclose(merged[name], alone[name], atol=1e-6) for name in merged)
    own = base_state(joined.model)
    assert all(torch.equal(tensor, own[name]) for name, tensor in merged_state(joined.model, None).items())


def test_merging_keeps_no_scorer_that_reads_otherwise(joined, runs, tmp_path):
    joined.export(tmp_path / "merged", "merged")
    merged = load(tmp_path / "merged")
    assert merged.scorer is None
    np.testing.assert_allclose(merged.encode(TEXTS), joined.encode(TEXTS), atol=1e-5)


def test_the_stored_adapters(runs, tmp_path):
    folder = shutil.copytree(runs["encode"], tmp_path / "copy")
    shutil.copytree(folder / "adapter", folder / "more")
    path = folder / "gerund.json"
    stored = json.loads(path.read_text())
    for given, expected in (
        (None, {"encode": "adapter", "infill": "adapter", "score": "adapter", "rerank": "adapter"}),
        ({"infill": "more"}, {"encode": "adapter", "infill": "more", "score": "adapter", "rerank": "adapter"}),
        ({"infill": None, "score": "more", "rerank": None}, {"encode": "adapter", "score": "more"}),
    ):
        path.write_text(json.dumps({**stored, **({} if given is None else {"adapters": given})}))
        assert read_adapters(folder) == {job: folder / place for job, place in expected.items()}
    for wrong, what in (
        ({"infil": "more"}, "valid are: infill, score, rerank"),
        ({"encode": "more"}, "job among the adapters"),
        ({"infill": 3}, "a folder or null"),
        (["more"], "by job"),
        ({"score": "../elsewhere"}, "outside its folder"),
        ({"score": "nowhere"}, "not an adapter folder"),
    ):
        path.write_text(json.dumps({**stored, "adapters": wrong}))
        with pytest.raises((ConfigError, DataError), match=what):
            gerund.load(folder)


def test_one_folder_lies_in_the_model_once(runs):
    folder = runs["encode"] / "adapter"
    adapters = Adapters.shared(folder)
    assert adapters.by_name == {"encode": folder}
    assert {adapters.name(job) for job in JOBS} == {"encode"}


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Return the folder of another model with an adapter of its own."""
    room = tmp_path_factory.mktemp("elsewhere")
    other = save_tiny(room / "other", seed=5)
    load(other, adapter=make_adapter(other, room / "lora")).save(room / "saved")
    return room / "saved"


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"infill_adapter": "nowhere"}, ModelError, "nowhere"),
        ({"scorer": "gerund/nowhere"}, ModelError, "there is no folder gerund/nowhere, and the hub"),
        ({"infill_adapter": "plain"}, DataError, "has no adapter to infill with"),
        ({"scorer": "plain"}, DataError, "has no adapter to score with"),
        ({"scorer": "infill"}, DataError, "was not trained to score"),
        ({"scorer": "elsewhere"}, DataError, "was not trained from the weights"),
        ({"infill_adapter": "elsewhere"}, DataError, "was not trained from the weights"),
    ],
)
def test_what_cannot_be_joined(options, error, what, runs, elsewhere, tiny_folder, tmp_path, monkeypatch):
    places = {"plain": tiny_folder, "elsewhere": elsewhere, **runs}
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    here = {name: tmp_path / value for name, value in options.items() if "/" not in value}
    given = {name: places.get(value, here.get(name, value)) for name, value in options.items()}
    with pytest.raises(GerundError, match=what) as caught:
        load(runs["encode"], **given)
    assert isinstance(caught.value, error)
