"""The page of models says what a survey finds; a survey finds what is wrong."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from gerund.attention import masked
from gerund.attention.interface import attach
from gerund.attention.layouts import attach_streams, decoder_layers
from gerund.doctor import support
from gerund.inference.infill.span_search import SpanPass
from tests.architectures.configs import KINDS, small_config
from tests.architectures.page import PAGE, page, sections, without_gaps
from tests.architectures.survey import Found, build, survey
from tests.tiny import N_LAYERS

# The fraction of all that has to be exact, so that a release of transformers that breaks many is noticed.
ENOUGH = 150
ROOT = PAGE.parents[1]
TEXT = PAGE.read_text(encoding="utf-8")
this_version = pytest.mark.skipif(
    f" transformers {transformers.__version__} " not in TEXT, reason="the page was made with another transformers"
)


@this_version
def test_the_page_names_every_architecture_once():
    found = sections(TEXT)
    assert sorted(kind for kinds in found.values() for kind in kinds) == sorted(KINDS)
    assert len(found["Exact"]) + len(found["Exact, with recurrent layers causal or both ways"]) >= ENOUGH


@pytest.mark.sweep(quick=0, check=3)
@this_version
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_is_exact_or_says_why_not(kind):
    torch.set_num_threads(1)
    found = survey(kind)
    assert found.verdict != "wrong", found.why
    own = page([found]).split("\n## ")[1].split("\n")[0]
    assert kind in sections(TEXT)[own]
    assert (kind in without_gaps(TEXT)) == bool(found.gaps)


@pytest.mark.slow
@this_version
@pytest.mark.parametrize(
    ("kind", "verdict", "gaps"),
    [
        ("llama", "exact", True),
        pytest.param("bloom", "exact", False, marks=pytest.mark.full),
        pytest.param("glm_moe_dsa", "exact", False, marks=pytest.mark.full),
        pytest.param("qwen3_next", "recurrent", False, marks=pytest.mark.full),
        ("mamba", "recurrent", False),
        ("gpt_neo", "causal", False),
    ],
)
def test_one_of_each_way_is_found_so_and_the_doctor_says_the_same(kind, verdict, gaps):
    found = survey(kind)
    assert found.verdict == verdict
    if verdict != "causal":
        assert (not found.gaps) == gaps
    model = build(small_config(kind))
    attach(model)
    attach_streams(decoder_layers(model))
    assert support(model, N_LAYERS).verdict == verdict


def test_a_survey_finds_masks_that_are_not_those_of_the_plan(monkeypatch):
    monkeypatch.setattr(masked, "_mask", lambda plan, index, module, hidden, kwargs: _asked(plan, index, hidden))
    monkeypatch.setattr("gerund.language_model.verify_once", lambda model, plan: None)
    found = survey("bloom")
    assert found.verdict == "wrong"
    assert "bidir is" in found.why


@pytest.mark.slow
def test_a_survey_finds_gaps_that_are_filled_under_another_mask(monkeypatch):
    monkeypatch.setattr("tests.architectures.survey.SpanPass", lambda *args, **_: SpanPass(*args, sees_right=False))
    found = survey("llama")
    assert found.verdict == "wrong"
    assert found.why.startswith("gaps are")


def _asked(plan, index, hidden):
    """Note that the layer has asked, and stay causal all the same."""
    plan.view(index)
    length = hidden.shape[1]
    causal = torch.full((length, length), torch.finfo(hidden.dtype).min).triu(1)
    return causal.expand(len(hidden), 1, length, length)


@pytest.mark.full
@this_version
def test_another_installation_is_compared_with_the_page(tmp_path):
    here = str(Path(transformers.__file__).parent.parent)
    command = [sys.executable, "-m", "tests.architectures", "--transformers"]
    done = subprocess.run([*command, here, "llama"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    done = subprocess.run([*command, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "holds no package transformers" in done.stderr


def test_what_is_printed_of_one():
    row = Found("made_up", "causal", "it has no layers")
    assert "| `made_up` | it has no layers |" in page([row], "1.2.3")
    assert "transformers 1.2.3" in page([row], "1.2.3")
