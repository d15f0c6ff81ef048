"""The examples run, with a tiny model in place of a real one."""

import json
import lzma
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gerund

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: object) -> None:
    sys.argv = [name, *map(str, arguments)]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.fixture(autouse=True)
def _restored_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", sys.argv)


def cosines(one_ND: np.ndarray, other_ND: np.ndarray) -> np.ndarray:
    lengths_N = np.linalg.norm(one_ND, axis=1) * np.linalg.norm(other_ND, axis=1)
    return (one_ND * other_ND).sum(1) / lengths_N


def test_search(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("Swallows nest in barns.\n\nBread is made of flour.\n")
    run("search.py", tmp_path, "what is bread", "--model", tiny_folder)
    first = capsys.readouterr().out
    assert len(first.splitlines()) == 2
    assert "notes.txt: Bread is made of flour." in first
    made = (tmp_path / ".vectors.npz").stat().st_mtime_ns
    run("search.py", tmp_path, "what is bread", "--model", tiny_folder)
    assert capsys.readouterr().out == first
    assert (tmp_path / ".vectors.npz").stat().st_mtime_ns == made, "kept vectors must be used again"
    (tmp_path / "more.txt").write_text("Trains run on rails.")
    run("search.py", tmp_path, "what is bread", "--model", tiny_folder)
    assert len(capsys.readouterr().out.splitlines()) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match=r"has no \.txt file"):
        run("search.py", tmp_path / "empty", "what is bread", "--model", tiny_folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("langchain_answers.py", "langchain_core"),
        ("llama_index_answers.py", "llama_index.core"),
        ("haystack_search.py", "haystack"),
    ],
)
def test_frameworks(
    name: str, library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HAYSTACK_TELEMETRY_ENABLED", "False")
    pytest.importorskip(library, reason=f"{library} is not installed")
    (tmp_path / "bread.txt").write_text("Bread is made of flour, water, salt and yeast.")
    (tmp_path / "more.txt").write_text("Trains need rails.\n\nSwallows nest in barns.")
    run(name, tmp_path, "what is bread made of")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert "bread.txt" in lines[0]
    if name != "langchain_answers.py":
        (tmp_path / "empty").mkdir()
        with pytest.raises(SystemExit, match=r"has no \.txt file"):
            run(name, tmp_path / "empty", "what is bread made of")


@pytest.mark.slow
def test_distillation_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    article = "The Nile is a river which flows north. Is it the longest of all? It is, says Dr. Watt, who knows it.\n"
    for name in ("wiki.train", "wiki.more", "books.train"):
        with lzma.open(tmp_path / f"{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            for number in range(9):
                file.write(json.dumps({"title": f"Nile {name} {number} (river)", "text": article * 12}) + "\n")
    (tmp_path / "vocab.txt").write_text("[PAD]\nwater\n##ing\nboat\na\n")
    run("distillation_texts.py", tmp_path, "-o", tmp_path / "out.jsonl", "--words", tmp_path / "vocab.txt")
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert capsys.readouterr().out == f"{len(texts)} texts\n"
    wanted = {"is it the longest of all?", "water", "boat", "the nile is a river which flows north."}
    assert {text.lower() for text in texts} >= wanted
    assert not {"[PAD]", "##ing", "a"} & set(texts)
    assert not any("Dr." in text and text.endswith("Dr.") for text in texts)
    assert any(len(text.split()) >= 30 for text in texts)


@pytest.mark.slow
def test_fit_head(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(gerund.__file__).parent / "assets" / "default"
    nouns = ("bread", "a train", "rain", "the moon", "a violin")
    rows = [{"text": f"{noun} and {other}"} for noun in nouns for other in nouns]
    pairs = [
        {"sentence1": f"I like {noun}.", "sentence2": f"I like {other}.", "score": float(noun == other)}
        for noun in nouns
        for other in nouns
    ]
    for name, lines in (("texts", rows), ("pairs", pairs)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ["--texts", tmp_path / "texts.jsonl", "--pairs", tmp_path / "pairs.jsonl"]
    # Nothing is learnt from it: the same vectors, twice as long.
    run("fit_head.py", folder, folder, tmp_path / "same", *files, "--rate", "0.01", "--share", "0", "--length", "2")
    lm, same = gerund.load(folder), gerund.load(tmp_path / "same")
    texts = [row["text"] for row in rows]
    before, after = (each.encode(texts, normalize_embeddings=False) for each in (lm, same))
    lengths = np.linalg.norm(after, axis=1) / np.linalg.norm(before, axis=1)
    np.testing.assert_allclose(lengths, 2, atol=0.05)
    assert cosines(before, after).min() > 0.99
    run("fit_head.py", folder, folder, tmp_path / "fitted", *files, "--steps", "60", "--weight", "1000")
    near, order = zip(*re.findall(r"teacher (\S+), .* pairs (\S+)", capsys.readouterr().out), strict=True)
    assert near[:3] == ("1.000", "1.000", "1.000")
    assert float(order[3]) >= float(order[2]) == float(order[0])
    # Pairs that count for so much move the vectors.
    assert cosines(before, gerund.load(tmp_path / "fitted").encode(texts)).max() < 0.999
    shutil.copytree(folder, tmp_path / "headless")
    (tmp_path / "headless" / "head.json").unlink()
    with pytest.raises(SystemExit):
        run("fit_head.py", tmp_path / "headless", folder, tmp_path / "none", *files)
    assert "no linear head" in capsys.readouterr().err
    for arguments, message in (
        ([folder, folder, tmp_path / "same", *files], "is there already"),
        ([folder, folder, tmp_path / "none", *files[:3], tmp_path / "texts.jsonl"], "sentence1"),
        ([tmp_path / "nothing", folder, tmp_path / "none", *files], "nothing"),
    ):
        with pytest.raises(SystemExit):
            run("fit_head.py", *arguments)
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_more_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (
        "sts",
        "classification/hwu64",
        "classification/chemprot",
        "classification/pubmedqa",
        "pairs",
        "suffix",
        "lm",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "sts/stsb.train.tsv").write_text("5.0\tA plane takes off.\tAn air plane takes off.\n")
    rows = {
        "classification/hwu64/train.jsonl": {"text": "wake me at nine"},
        "classification/chemprot/train.jsonl": {"text": "The << enzyme >> binds [[ zinc ]] ."},
        "classification/pubmedqa/train.jsonl": {
            "text": "Does zinc help the heart? It was given to 40 people. Few fell ill."
        },
        "pairs/mqp.jsonl": {"text1": "Is a cough dangerous?", "text2": "Should I fear a cough?"},
        "suffix/hellaswag.jsonl": {"prefix": "Riding a horse: A woman sits on a horse. She"},
    }
    for name, row in rows.items():
        (tmp_path / name).write_text(json.dumps(row) + "\n")
    passage = "The cells of this tissue make a protein, which helps the patients who have the disease and lack it. " * 3
    for name in ("wiki.train", "wiki.more"):
        with lzma.open(tmp_path / f"lm/{name}.jsonl.xz", "wt", encoding="utf-8") as file:
            file.write(json.dumps({"title": "Tissue", "text": f"{passage}\n{'No word of it here. ' * 9}"}) + "\n")
    run("more_texts.py", tmp_path, "-o", tmp_path / "out.jsonl", "--most", "30")
    output = capsys.readouterr().out
    texts = {json.loads(line)["text"].lower() for line in (tmp_path / "out.jsonl").read_text().splitlines()}
    assert "science: 1 of" in output
    assert "docstrings: 30 of" in output
    assert texts >= {
        "an air plane takes off.",
        "wake me at nine",
        "the enzyme binds zinc.",
        "does zinc help the heart?",
    }
    assert not any("no word of it" in text for text in texts)
    with pytest.raises(SystemExit):
        run("more_texts.py", tmp_path / "nothing", "-o", tmp_path / "out.jsonl")
    assert "stsb.train.tsv" in capsys.readouterr().err


@pytest.mark.slow
def test_threads(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("threads.py", "--model", tiny_folder)
    output = capsys.readouterr().out
    assert "the same text as alone: True" in output
    assert "the same vectors as alone: 30 of 30 times" in output


@pytest.mark.slow
def test_compare_plans(tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ["5.0\ta cat\ta cat", "3.0\ta cat\ta kitten", "1.0\ta cat\tthe rates rose", "0.0\tthe sea\tbread"]
    (tmp_path / "pairs.tsv").write_text("\n".join(rows))
    run("compare_plans.py", tmp_path / "pairs.tsv", "--model", tiny_folder)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {plan for plan, _ in lines} >= {"causal", "bidir", "mask0-bidir"}
    assert [float(value) for _, value in lines] == sorted((float(value) for _, value in lines), reverse=True)


def test_spearman_gives_ties_their_mean_rank() -> None:
    names = runpy.run_path(str(EXAMPLES / "compare_plans.py"))
    import numpy as np

    assert names["ranks"](np.array([3.0, 1.0, 1.0, 9.0])).tolist() == [3.0, 1.5, 1.5, 4.0]
    assert names["spearman"](np.array([1.0, 2.0, 3.0]), np.array([9.0, 5.0, 1.0])) == pytest.approx(-1.0)


def test_the_page_about_scale_is_what_its_example_computes(capsys: pytest.CaptureFixture[str]) -> None:
    run("scale.py")
    table = capsys.readouterr().out.strip()
    assert table in (EXAMPLES.parent / "docs" / "scale.md").read_text(encoding="utf-8"), "put it there again"
    run("scale.py", "--texts", 1e8, "--gpus", 8)
    less = capsys.readouterr().out
    hours = [float(line.split("|")[4].replace(",", "")) for line in table.splitlines()[2:10]]
    tenth = [float(line.split("|")[4].replace(",", "")) for line in less.splitlines()[2:10]]
    assert tenth[2] == pytest.approx(hours[2] * 0.8, rel=0.01), "a tenth of the texts, an eighth of the GPUs"
    assert tenth[7] == pytest.approx(hours[7] / 10, rel=0.01)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_the_unit_is_one_that_systemd_accepts(tmp_path: Path) -> None:
    unit = (EXAMPLES / "serve" / "gerund.service").read_text(encoding="utf-8")
    # The program that is named is not installed there, on most machines.
    (tmp_path / "gerund.service").write_text(unit.replace("/usr/local/bin/gerund", sys.executable), encoding="utf-8")
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / "gerund.service")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
