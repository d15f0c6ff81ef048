"""``gerund negatives`` on the command line."""

import json

import pytest

from gerund.papers.rankgen_negatives import NegativesConfig, make_negatives
from gerund.scoring.registry import find_scorer
from gerund.settings.sampling import Sampling
from tests.cli.helpers import no_loading, run_cli
from tests.papers.rankgen_negatives.runs import SMALL, rows


class TestCommandLine:
    @pytest.mark.slow
    def test_makes_and_resumes(self, books, tmp_path, tiny_folder, lm):
        words = ["--prefix-words", 12, "--fewest-words", 3, "--most-words", 9, "--per-document", 3]
        ran = run_cli("negatives", books, "-o", tmp_path / "out", "-m", tiny_folder, "--generate", 1, *words, "--json")
        assert ran.code == 0
        made = json.loads(ran.out)
        assert (made["passages"], made["short"]) == (12, 1)
        settings = NegativesConfig(**SMALL, per_document=3, generate=1.0, sampling=Sampling(1.0, top_p=0.9))
        make_negatives([books], tmp_path / "other", settings, lm=lm)
        assert rows(tmp_path / "out") == rows(tmp_path / "other")
        ran = run_cli(
            "negatives", books, "-o", tmp_path / "out", "-m", tiny_folder, "--generate", 1, *words, "--resume"
        )
        assert ran.out.startswith("12 passages of 4 documents in ")
        assert "1 documents were too short" in ran.out
        again = ["negatives", books, "-o", tmp_path / "out", "-m", tiny_folder, "--generate", 1, *words]
        assert "out exists already; resume it, replace it with --force" in run_cli(*again).mistake
        assert run_cli(*again, "--force").out.startswith("12 passages of 4 documents in ")

    def test_hard(self, books, tmp_path, tiny_folder, lm):
        words = ["--prefix-words", 12, "--fewest-words", 3, "--most-words", 9, "--per-document", 2]
        options = ["--generate", 0, "--hard", 1, "--scorer", "overlap"]
        ran = run_cli("negatives", books.parent, "-o", tmp_path / "out" / "deep", "-m", tiny_folder, *options, *words)
        assert (ran.code, ran.err) == (0, "")
        settings = NegativesConfig(**SMALL, per_document=2, generate=0.0, hard=1)
        make_negatives([books], tmp_path / "other", settings, scorer=find_scorer("overlap", lm))
        assert rows(tmp_path / "out" / "deep") == rows(tmp_path / "other")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--hard", 3], "--hard and --scorer belong together"),
            (["--scorer", "pmi"], "--hard and --scorer belong together"),
            (["--batch-size", 0], "batch_size=0"),
            (["--generate", 2], "no fraction"),
            (["--hard", 1, "--scorer", "pmy"], "unknown scorer 'pmy'"),
        ],
    )
    def test_mistakes(self, books, tmp_path, options, message):
        with no_loading():
            assert message in run_cli("negatives", books, "-o", tmp_path / "out", *options).mistake
        assert not (tmp_path / "out").exists()

    def test_missing_file(self, tmp_path):
        assert "absent: no such file or folder" in run_cli("negatives", "absent", "-o", tmp_path / "out").mistake
