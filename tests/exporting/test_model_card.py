"""The card of a saved model: its examples run, and it states where the model comes from."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard

import gerund
from gerund.errors import DataError
from gerund.exporting.hub import PLACE, _shown, with_scores
from gerund.models.origin import origin_of
from gerund.models.sources import Source, find
from tests.adapters import make_adapter
from tests.cli.helpers import run_cli
from tests.tiny import save_tiny

CARD = """---
license: other
license_name: terms
license_link: https://example.org/terms
language: [en]
base_model: someone/pretrained
---

# The base's own card
"""


@pytest.fixture
def base(tiny_folder: Path, tmp_path: Path) -> Path:
    folder = save_tiny(tmp_path / "models--acme--base" / "snapshots" / "1")
    (folder / "README.md").write_text(CARD)
    (folder / "LICENSE.txt").write_text("the terms")
    return folder


def fields(folder: Path) -> dict:
    return ModelCard.load(folder / "README.md").data.to_dict()


def examples(folder: Path) -> list[str]:
    text = (folder / "README.md").read_text().replace(PLACE, str(folder))
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.slow
def test_the_examples_run(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gerund.load(base, prompts={"query": "Find: "}).save(tmp_path / "saved")
    found = examples(tmp_path / "saved")
    assert ["import gerund" in found[0], "transformers" in found[1], "integrations" in found[2]] == [True] * 3
    vectors = []
    for example in found:
        names: dict = {}
        exec(example, names)
        vectors += [names["vectors"]] if "vectors" in names else []
    assert np.allclose(vectors[0], vectors[1], atol=1e-5)
    assert len(capsys.readouterr().out) > 40


@pytest.mark.filterwarnings("ignore")  # of PEFT
def test_what_a_card_states(base: Path, tmp_path: Path) -> None:
    adapter = make_adapter(base, tmp_path / "lora")
    lm = gerund.load(base, attention="mask0-bidir", k=2, prompts={"query": "Find: "}, adapter=adapter)
    lm.save(tmp_path / "saved")
    found = fields(tmp_path / "saved")
    assert (found["base_model"], found["license"], found["license_name"]) == ("acme/base", "other", "terms")
    assert (found["pipeline_tag"], found["language"]) == ("text-generation", ["en"])
    text = (tmp_path / "saved" / "README.md").read_text()
    for row in (
        "| attention plan | `mask0-bidir k=2` |",
        f"| dimensions | {lm.dimensions} |",
        '| prompt `query` | `"Find: "` |',
        "| adapters | to encode, to infill, to score, to rerank |",
        "That of the base model: [terms](https://example.org/terms). See [LICENSE.txt](LICENSE.txt).",
    ):
        assert row in text, row
    assert (tmp_path / "saved" / "LICENSE.txt").read_text() == "the terms"
    # Where it comes from is known after another save, and after a conversion.
    gerund.load(tmp_path / "saved").save(tmp_path / "again")
    assert fields(tmp_path / "again")["base_model"] == "acme/base"
    ran = run_cli("convert", base, tmp_path / "converted", "--attention", "causal")
    assert ran.code == 0
    assert fields(tmp_path / "converted")["license_name"] == "terms"
    assert (tmp_path / "converted" / "README.base.md").read_text() == CARD


def test_where_models_come_from(tiny_folder: Path, tmp_path: Path) -> None:
    gerund.load(tiny_folder).save(tmp_path / "saved")
    text = (tmp_path / "saved" / "README.md").read_text()
    assert "The license of the base model isn't known" in text
    assert str(tiny_folder.parent) not in text
    assert "base_model" not in fields(tmp_path / "saved")
    short = origin_of(Source("smollm2", tiny_folder))
    assert (short.base_model, short.terms) == ("HuggingFaceTB/SmolLM2-135M-Instruct", {"license": "apache-2.0"})
    assert origin_of(Source("acme/unseen", None)).base_model == "acme/unseen"
    (tiny := find(save_tiny(tmp_path / "tiny"))).folder.joinpath("README.md").write_bytes(b"---\nlicense: [\n---\n\xff")
    assert origin_of(tiny).terms == {}
    lm = gerund.load(tiny_folder)
    made = gerund.LanguageModel(lm.model, lm.tokenizer)
    made.save(tmp_path / "made")
    assert "No license is stated" in (tmp_path / "made" / "README.md").read_text()


def report(folder: Path, fingerprint: str) -> Path:
    folder.mkdir()
    score = {"task": "sts/one", "system": "x", "unit": "percent", "score": {"main": "r", "metrics": {"r": 0.71239}}}
    data = {"systems": [{"label": "x", "description": {"fingerprint": fingerprint}}], "scores": [score]}
    (folder / "results.json").write_text(json.dumps(data))
    return folder


def test_scores_of_an_evaluation(tiny_folder: Path, tmp_path: Path) -> None:
    lm = gerund.load(tiny_folder)
    lm.save(tmp_path / "saved")
    text = (tmp_path / "saved" / "README.md").read_text()
    scored = with_scores(text, report(tmp_path / "report", lm.fingerprint()), lm.fingerprint())
    assert "| sts/one | r | 71.24 |" in scored
    assert scored.index("## Scores") < scored.index("## License")
    assert ModelCard(scored).data.eval_results[0].metric_value == 71.24
    assert [_shown(0.0123456, "fraction"), _shown(12.345678, "perplexity")] == [1.23, 12.35]
    again = with_scores(scored, tmp_path / "report", lm.fingerprint())
    assert again.count("## Scores") == 1
    with pytest.raises(DataError, match=r"has no scores of the encoder 0123; it has x \("):
        with_scores(text, tmp_path / "report", "0123")
    (tmp_path / "report" / "results.json").write_text("[]")
    with pytest.raises(DataError, match=r"is not the results\.json of gerund eval"):
        with_scores(text, tmp_path / "report", "0123")
