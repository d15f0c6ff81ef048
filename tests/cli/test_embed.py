"""``gerund embed`` from its arguments to its files, with real models and real mistakes."""

import errno
import json
import os
import sys
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

import gerund
from gerund.cli.embed import Encoding, _workers
from gerund.data.embedding import job
from gerund.data.embedding.files import read_embeddings
from gerund.errors import ResourceError
from gerund.jobs.engine import LocalEngine
from gerund.quantization import quantize, ranges_of
from tests.cli.helpers import no_loading, run_cli, run_python

TEXTS = [f"{'the cat and ' * (i % 4)}text {i}" for i in range(12)]


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


def test_vectors_are_those_of_encode(source, tiny_folder, tmp_path):
    out = tmp_path / "out.parquet"
    ran = run_cli("embed", source, "-m", tiny_folder, "-o", out, "--shard-rows", 5, "--dtype", "float32", "--json")
    assert ran.code == 0, ran.err
    lm = gerund.load(tiny_folder, dtype="float32")
    found = read_embeddings(out, fingerprint=lm.fingerprint())
    np.testing.assert_allclose(found.vectors, lm.encode(TEXTS), atol=1e-6)
    assert found.ids == list(range(12))
    assert found.info["model"] == str(tiny_folder)
    assert found.info["attention"]["name"] == "mask0-bidir"
    assert (found.info["normalize"], found.info["pooling"], found.info["prompt"]) == (True, "mean", "")
    assert ran.err.startswith("gerund: 12 rows in ")
    assert ran.err.endswith(f"{out}\n")
    report = json.loads(ran.out)
    assert (report["rows"], report["dimensions"], report["fingerprint"]) == (12, 32, lm.fingerprint())


def test_every_setting_reaches_the_encoder(tiny_folder, tmp_path):
    source = tmp_path / "in.csv"
    source.write_text("key,body\na,one text\nb,\nc,another text\n")
    out = tmp_path / "out.npy"
    options = "--column body --id-column key --dimensions 7 --no-normalize --empty zeros --keep-text --batch-tokens 99"
    plan = "--attention mask0+bidir --k 3 --k0 1 --pooling last --max-length 40 --dtype float32 --device cpu"
    ran = run_cli("embed", source, "-m", tiny_folder, "-o", out, "--prompt", "Q: ", *options.split(), *plan.split())
    assert ran.code == 0, ran.err
    assert "1 empty" in ran.err
    lm = gerund.load(tiny_folder, attention="mask0+bidir", k=3, k0=1, pooling="last", max_length=40, dtype="float32")
    texts = ["one text", "", "another text"]
    expected = lm.encode(texts, prompt="Q: ", dimensions=7, normalize=False, empty="zeros")
    found = read_embeddings(out, fingerprint=lm.fingerprint(7))
    np.testing.assert_allclose(found.vectors, expected, atol=1e-6)
    assert not found.vectors[1].any()
    assert found.ids == ["a", "b", "c"]
    assert found.info["prompt"] == "Q: "
    assert [json.loads(line)["text"] for line in (tmp_path / "out.ids.jsonl").read_text().splitlines()] == texts


def test_long_texts_are_counted_or_refused(tiny_folder, tmp_path):
    source = tmp_path / "in.txt"
    source.write_text("short\n" + "x" * 99 + "\nshort\n" + "y" * 99 + "\n")
    out = tmp_path / "out.npy"
    refused = run_cli("embed", source, "-m", tiny_folder, "-o", out, "--overflow", "error")
    assert f"{source}, line 2: the text has 100 tokens and there is room for 64" in refused.mistake
    ran = run_cli("embed", source, "-m", tiny_folder, "-o", out, "--shard-rows", 2)
    assert ran.code == 0, ran.err
    assert "2 texts cut at 64 tokens" in ran.err
    assert ran.err.count("\n") == 1


LONG_LINE = """
import sys
from gerund.cli.main import main
from gerund.training.processes import peak_memory_mib

model = sys.argv[1]

def peak(source):
    sys.argv = ["gerund", "embed", source, "-o", source + ".npy", "-m", model]
    try:
        main()
    except SystemExit as stop:
        assert not stop.code, stop.code
    return peak_memory_mib()

print(-peak("short.txt") + peak("long.txt"))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak counts the process that starts it")
def test_a_line_of_five_megabytes_takes_little_memory(tiny_folder, tmp_path):
    (tmp_path / "short.txt").write_text("a dog\nthe cat\n")
    (tmp_path / "long.txt").write_text("the cat in another thing " * 200_000 + "\nthe cat\n")
    done = run_python("-c", LONG_LINE, tiny_folder, cwd=tmp_path)
    assert "1 texts cut at 64 tokens" in done.stderr
    # A few times the text itself; with all its tokens it were 700 MB.
    assert int(done.stdout) < 200


def test_standard_input(tiny_folder, tmp_path):
    rows = '{"id": "a", "text": "one"}\n{"id": "b", "text": "two"}\n'
    out = tmp_path / "out.parquet"
    ran = run_cli("embed", "-", "--format", "jsonl", "-m", tiny_folder, "-o", out, stdin=rows)
    assert ran.code == 0, ran.err
    assert pq.read_table(out)["id"].to_pylist() == ["a", "b"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.parquet"]


@pytest.mark.slow
@pytest.mark.parametrize("what, code", [(KeyboardInterrupt(), 130), (ResourceError("out of memory"), 1)])
def test_interrupted_says_how_to_go_on(source, tiny_folder, tmp_path, monkeypatch, what, code):
    out = tmp_path / "out.npy"
    own, calls = gerund.LanguageModel.encode_with_usage, []

    def twice(*arguments, **options):
        calls.append(None)
        if len(calls) == 3:
            raise what
        return own(*arguments, **options)

    arguments = ["embed", source, "-m", tiny_folder, "-o", out, "--shard-rows", 4]
    with monkeypatch.context() as patch:
        patch.setattr(gerund.LanguageModel, "encode_with_usage", twice)
        ran = run_cli(*arguments)
    assert ran.code == code
    assert f"8 of 12 rows are kept in {out}.parts: run the same command again to go on from there\n" in ran.err
    assert "8 of them done before" in run_cli(*arguments).err


def test_a_full_disk_is_no_mistake_of_the_user(source, tiny_folder, tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    ran = run_cli("embed", source, "-m", tiny_folder, "-o", tmp_path / "out.npy")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("gerund: error: ")
    assert ran.err.endswith("No space left on device\n")


@pytest.mark.sweep(quick=3, check=6)
@pytest.mark.parametrize("ending", ["parquet", "npy"])
@pytest.mark.parametrize("precision", ["int8", "uint8", "binary", "ubinary"])
def test_vectors_in_fewer_bits(source, tiny_folder, tmp_path, ending, precision):
    plain, small = tmp_path / f"plain.{ending}", tmp_path / f"small.{ending}"
    arguments = ("embed", source, "-m", tiny_folder, "--shard-rows", 5)
    assert run_cli(*arguments, "-o", plain).code == 0
    # In several parts: the ranges are those of all rows.
    ran = run_cli(*arguments, "-o", small, "--precision", precision)
    assert ran.code == 0, ran.err
    whole, found = read_embeddings(plain), read_embeddings(small)
    assert found.ids == whole.ids
    assert found.info["precision"] == precision
    ranges = ranges_of(whole.vectors)
    np.testing.assert_array_equal(found.vectors, quantize(whole.vectors, precision, ranges))
    if "int8" in precision:
        np.testing.assert_allclose(found.info["ranges"], ranges)


def test_files_of_a_folder_that_are_passed_over_are_told(tmp_path, tiny_folder):
    folder = tmp_path / "notes"
    folder.mkdir()
    for name in ("a.txt", "b.md", "c.md", ".hidden.md"):
        (folder / name).write_text("the cat")
    done = run_cli("embed", folder, "-o", tmp_path / "out.parquet", "-m", tiny_folder)
    assert done.code == 0, done.err
    assert "2 .md" in done.err


def test_bad_rows_are_left_out_and_listed(tiny_folder, tmp_path):
    source, out = tmp_path / "in.jsonl", tmp_path / "out.parquet"
    rows = ['{"text": "the cat"}', "{", '{"text": "%s"}' % ("cat and " * 400), '{"text": ""}', '{"text": "a dog"}']
    source.write_text("\n".join(rows))
    options = ["-m", tiny_folder, "--max-length", 40, "--overflow", "error", "--bad-rows", "skip", "--json"]
    ran = run_cli("embed", source, "-o", out, *options)
    assert ran.code == 0, ran.err
    assert f"gerund: warning: {source}, line 2: not valid JSON" in ran.err
    assert f"gerund: warning: 3 rows not used: {tmp_path / 'out.errors.jsonl'}\n" in ran.err
    report = json.loads(ran.out)
    assert (report["rows"], report["bad"], report["errors_file"]) == (2, 3, str(tmp_path / "out.errors.jsonl"))
    assert read_embeddings(out).ids == [0, 4]
    listed = [json.loads(line) for line in (tmp_path / "out.errors.jsonl").read_text().splitlines()]
    assert [one["place"].removeprefix(f"{source}, ") for one in listed] == ["line 2", "line 4", "line 3"]
    assert listed[-1]["reason"] == "the text has more than 40 tokens, prompt included"


@pytest.mark.slow
def test_several_processes_give_the_same_bytes(source, tiny_folder, tmp_path):
    alone, spread = tmp_path / "alone.parquet", tmp_path / "spread.parquet"
    options = ["-m", tiny_folder, "--shard-rows", 3, "--dtype", "float32", "--threads", 1, "--json"]
    assert run_cli("embed", source, "-o", alone, *options).code == 0
    ran = run_cli("embed", source, "-o", spread, *options, "--workers", 2)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["rows"] == len(TEXTS)
    assert spread.read_bytes() == alone.read_bytes()
    assert not spread.with_name("spread.parquet.parts").exists()


def test_a_job_is_gone_on_with_by_as_many_threads(source, tiny_folder, tmp_path):
    out = tmp_path / "out.parquet"
    options = ["embed", source, "-m", tiny_folder, "-o", out, "--shard-rows", 5, "--dtype", "float32"]
    full = patch.object(job, "join_parquet", side_effect=ResourceError("the disk is full"))
    with full:
        assert run_cli(*options, "--threads", 1).code == 1
    assert "threads was 1 and is 2; go on as before" in run_cli(*options, "--threads", 2).mistake
    torch.set_num_threads(1)
    assert run_cli(*options, "--threads", 1).code == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--dimensions", -1], "dimensions=-1 is not between 1 and as many as a vector has"),
        (["--empty", "drop"], "unknown way with empty texts 'drop'; valid are: error, zeros, skip"),
        (["--bad-rows", "drop"], "unknown way with bad rows 'drop'; valid are: error, skip"),
        (["--overflow", "wrap"], "unknown --overflow 'wrap'; valid are: truncate, error"),
        (["--format", "xml"], "unknown format 'xml'; valid are: txt, jsonl, csv, tsv, parquet"),
        (["--shard-rows", "0"], "shard_rows must be at least 1, got 0"),
        (["--precision", "int4"], "unknown precision 'int4'"),
        (["--workers", 0], "workers must be from 1 to 100000, got 0"),
        (["--threads", 0], "threads=0 leaves nothing to compute with"),
        (["--engine", "spark"], "unknown engine 'spark'; valid are: local, ray"),
        (["--address", "auto"], "--address auto is that of a Ray cluster; give --engine ray too"),
    ],
)
def test_mistakes_before_the_model_is_loaded(source, tmp_path, options, message):
    with no_loading():
        assert message in run_cli("embed", source, "-o", tmp_path / "out.parquet", *options).mistake
    assert list(tmp_path.iterdir()) == [source]


def test_workers_are_told_how_many_passes_a_text_takes(bundled) -> None:
    """Without templates there is one; none would count no row of an interrupted job as saved."""
    for lm, passes in ((bundled, 1), (bundled.with_encoder(replace(bundled.encoder, template="metaeol")), 8)):
        made = _workers(LocalEngine(2), lm, lm.spec, 1, Encoding({"prompt": None}, False))
        assert made.passes == passes
