"""The benchmarks' harness, their result files, the page that is rendered of them, and that each script still starts.

Speed itself is not tested: what a script measures is written down by hand-run scripts, on a quiet machine.
"""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
sys.path.insert(0, str(FOLDER))  # scripts find harness.py beside them; so do these tests

import harness  # noqa: E402
import render  # noqa: E402
import results  # noqa: E402
from results import BY_SCRIPT, CARRIED, Column, Result, Run, Table  # noqa: E402

LIBRARY = {"harness", "inputs", "render", "results", "servers", "study"}
LIBRARY |= {"real_models_data", "real_models_picture"}
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.stem not in LIBRARY)
FILES = sorted(results.RESULTS.glob("*.json"))
# What `--quick` needs beside the library: arguments, whether it reads ../shared/data, and a peer.
STUDIES = {
    "training": ("unimae",),
    "scorers": (),
    "gur": (),
    "decoding": (),
    "training_free": (),
    "real_models": ("--models", "default"),
    "hybrids": (),
    "quality": (),
    "alignment": ("--teacher", "default"),
}
# Reads ../shared/data and keeps nothing.
DATA = {"ask", "ranking", "relevance", "query_head", "index", "kept_chunks", "stack"}
PEERS = {
    **{"encode": "sentence_transformers", "serve": "fastapi", "relevance": "mteb"},
    **{"index": "lancedb", "index_cost": "lancedb", "runtimes": "openvino", "stack": "xllamacpp"},
    "alignment": "lancedb",
}
RUN = Run(command="python benchmarks/speed.py", machine="2 cores", date="2026-11-23")


def imported(path: Path) -> ModuleType:
    """Import a script under a name of its own: `mining` and `memory` are names that others may want."""
    spec = importlib.util.spec_from_file_location(f"benchmark_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_table(**changes: object) -> Table:
    columns = [Column("system", "system"), Column("cpu", "processor time", "s", 2, "lower")]
    rows = [{"system": "peer", "cpu": 2.0}, {"system": "gerund", "cpu": 1.0}]
    return replace(Table("speed", "How fast.", columns, rows, RUN), **changes)


# ------------------------------------------------------------------------------------------------ files and the page


def test_the_pages_are_what_the_result_files_say() -> None:
    assert render.TABLES.read_text(encoding="utf-8") == render.page(), "run `make benchmark-page`"
    assert render.DOCS.read_text(encoding="utf-8") == render.headlines(), "run `make benchmark-page`"
    assert len(render.headlines().split()) <= 3000


def test_every_script_has_a_result_file_and_every_result_file_a_script_or_commands() -> None:
    found = {path.stem: results.read(path) for path in FILES}
    assert {path.stem for path in SCRIPTS} <= set(found)
    for name, result in found.items():
        assert result.name == name
        if result.script:
            assert result.script == f"benchmarks/{name}.py"
            assert (ROOT / result.script).is_file(), name
        assert result.tables, name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_result_files_say_how_they_were_measured(path: Path) -> None:
    for table in results.read(path).tables:
        where = f"{path.stem}, {table.id}"
        run = table.run
        assert run is not None, where
        assert table.caption.endswith("."), where
        assert run.command or run.recorded != BY_SCRIPT, where
        assert run.machine, where
        assert re.match(r"2\d{3}-\d\d-\d\d", run.date), where
        assert run.recorded == BY_SCRIPT or re.fullmatch(
            re.escape(CARRIED) + r"\d{4}-\d\d-\d\d, commit [0-9a-f]{7,}", run.recorded
        ), where
        if run.recorded == BY_SCRIPT:
            assert run.commit and run.versions and run.machine_busy is not None, where  # noqa: PT018
            assert "--quick" not in run.command, f"{where}: a quick run is no result"
        keys = [column.key for column in table.columns]
        assert len(keys) == len(set(keys)), where
        for row in table.rows:
            assert set(row) <= {*keys, "reference"}, where
            assert row.get(keys[0]) is not None, where


def test_writing_a_file_again_gives_the_same_file(tmp_path: Path) -> None:
    for path in FILES:
        results.write(results.read(path), tmp_path / path.name)
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name


def test_a_table_that_the_page_does_not_name_is_an_error(tmp_path: Path) -> None:
    for path in FILES:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    results.write(Result("unknown", "", [small_table()]), tmp_path / "unknown.json")
    with pytest.raises(ValueError, match="unknown:speed"):
        render.page(tmp_path)


def test_measuring_one_table_leaves_the_others_and_all_conclusions(tmp_path: Path) -> None:
    path = tmp_path / "two.json"
    first = [small_table(conclusion="Twice as fast."), small_table(id="memory")]
    results.write(Result("two", "benchmarks/two.py", first, note="A note."), path)
    again = small_table(rows=[{"system": "gerund", "cpu": 3.0}])
    results.write(Result("two", "benchmarks/two.py", [again]), path)
    read = results.read(path)
    assert [table.id for table in read.tables] == ["speed", "memory"]
    assert read.tables[0].rows == again.rows
    assert read.tables[0].conclusion == "Twice as fast."
    assert read.note == "A note."


def test_a_mistyped_key_in_a_file_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    results.write(Result("one", "", [small_table()]), path)
    path.write_text(path.read_text("utf-8").replace('"caption"', '"captoin"'), "utf-8")
    with pytest.raises(TypeError, match="captoin"):
        results.read(path)


def test_how_tables_are_written() -> None:
    columns = [
        Column("system", "system"), Column("cpu", "processor time", "s", 2, "lower"),
        Column("score", "score", "%", 1, "higher"), Column("empty", "nobody has this"), Column("pairs", "pairs"),
    ]  # fmt: skip
    rows = [
        {"system": "peer|old", "cpu": results.median_of([2.0, 1.0, 4.0]), "score": results.mean_of([50.0, 52.0])},
        {"system": "gerund", "cpu": results.median_of([1.5]), "score": 51.0, "pairs": 12345},
        {"system": "BM25", "score": {"mean": 70.25, "digits": 2}, "reference": True},
    ]
    assert render.markdown(Table("t", "What.", columns, rows)).splitlines() == [
        "| system | processor time, s | score, % | pairs |",
        "| --- | --- | --- | --- |",
        "| peer\\|old | 2.00 (1.00 to 4.00) | **51.0 ± 1.4** |  |",
        "| gerund | **1.50** | **51.0** | 12,345 |",
        "| BM25 |  | 70.25 |  |",
    ]


# -------------------------------------------------------------------------------------------------------- the harness


def test_systems_take_turns_in_reversed_order_every_second_round() -> None:
    ran, prepared = [], []
    systems = {name: (lambda name=name: ran.append(name)) for name in "abc"}
    rounds = harness.alternate(systems, 3, prepare=lambda name, number: prepared.append((name, number)))
    assert ran == list("abccbaabc")
    assert prepared[2:5] == [("c", 0), ("c", 1), ("b", 1)]
    assert {name: len(spent) for name, spent in rounds.spent.items()} == {"a": 3, "b": 3, "c": 3}


def test_ratios_are_taken_within_a_round() -> None:
    # In the second round the machine was four times as slow: ratios of medians would say 2 / 8 or so.
    peer = [harness.Spent(cpu, 0) for cpu in (2.0, 8.0, 2.0)]
    ours = [harness.Spent(cpu, 0) for cpu in (1.0, 4.0, 0.5)]
    rounds = harness.Rounds({"peer": peer, "gerund": ours})
    assert rounds.times_as_fast("gerund", "peer") == {"median": 2.0, "min": 2.0, "max": 4.0, "rounds": 3}
    base, own = rounds.rows("peer", texts="short")
    assert base["ratio"] is None
    assert own["texts"] == "short"
    assert own["cpu"] == {"median": 1.0, "min": 0.5, "max": 4.0, "rounds": 3}


def test_processor_time_is_not_the_clock() -> None:
    import time

    spent = harness.spend(lambda: time.sleep(0.05))
    assert spent.wall >= 0.05
    assert spent.cpu < spent.wall


@pytest.mark.parametrize("difference", [0.2, float("nan")])
def test_nothing_is_timed_that_does_not_compute_the_same(difference: float) -> None:
    with pytest.raises(harness.NotTheSame, match="largest difference"):
        harness.require("largest difference", difference, 0.1)


def test_differences() -> None:
    assert harness.require("largest difference", 0.05, 0.1) == "largest difference 5.0e-02 (allowed 1e-01)"
    assert harness.largest_difference(np.array([1.0, 2.0]), [1.0, 2.5]) == 0.5
    assert harness.relative_difference([1.1, 0.0], [1.0, 0.0]) == pytest.approx(0.1)
    assert np.isnan(harness.relative_difference([1.0], [1.0, 2.0])), "a missing gradient is no small difference"


def test_quick_changes_defaults_and_nothing_that_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("MKL_NUM_THREADS", "1")

    def options(*argv: str) -> tuple[int, int]:
        parser = harness.parser("A script.", rounds=5)
        parser.add_argument("--texts", type=int, default=1000)
        found = harness.parse(parser, argv, quick={"texts": 10})
        return found.rounds, found.texts

    assert options() == (5, 1000)
    assert options("--quick") == (1, 10)
    assert options("--quick", "--texts", "20", "--rounds", "2") == (2, 20)
    with pytest.raises(SystemExit):
        options("--rounds", "0")


def test_a_command_names_no_folder_of_a_machine() -> None:
    argv = ["--data", "/somewhere/deep/data", "--work=/somewhere/else/work", "--only", "both, batch 8", "--rounds", "3"]
    assert harness.command_of("/a/b/benchmarks/scorers.py", argv) == (
        'python benchmarks/scorers.py --data data --work=work --only "both, batch 8" --rounds 3'
    )


def test_a_report_says_how_it_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parser = harness.parser("A script.")
    parser.add_argument("--texts", type=int, default=7)
    options = harness.parse(parser, ["--output", str(tmp_path / "speed.json")])
    harness.report(options, "speed.py", [small_table(run=None, checks=["all equal"])], width=3)
    [table] = results.read(tmp_path / "speed.json").tables
    assert table.run is not None
    assert table.run.recorded == BY_SCRIPT
    assert table.run.settings == {"rounds": 3, "threads": 1, "texts": 7, "width": 3}
    assert str(tmp_path) not in json.dumps(table.run.command)
    assert "checked: all equal" in capsys.readouterr().out


def test_a_quick_run_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    harness.report(harness.parse(harness.parser("A script."), ["--quick"]), "speed.py", [small_table(run=None)])
    assert not (results.RESULTS / "speed.json").exists()
    assert "written" not in capsys.readouterr().out


# -------------------------------------------------------------------------------------------------------- the scripts


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_scripts_import_what_is_there_and_explain_themselves(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        imported(path).main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert f"python benchmarks/{path.name}" in said
    assert all(option in said for option in ("--rounds", "--threads", "--output", "--quick"))
    named = {
        option
        for page in sorted((ROOT / "docs").rglob("*.md"))
        if page.name != "benchmarks.md"  # what was run is told in the words of its time
        for call in re.findall(rf"python benchmarks/{path.name}([^`\n]*)", page.read_text(encoding="utf-8"))
        for option in re.findall(r"(?<!\S)--?[a-z][\w-]*", call)
    }
    assert not {option for option in named if not re.search(rf"(?<![\w-]){option}(?![\w-])", said)}


@pytest.mark.full  # half a minute and more each; what they measure with is tested above
@pytest.mark.parametrize("name", [path.stem for path in SCRIPTS])
def test_scripts_run_to_their_end(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    arguments = ["--quick", "--output", str(tmp_path / "result.json")]
    if name in PEERS:
        pytest.importorskip(PEERS[name])
    if name in STUDIES:
        data = request.getfixturevalue("data_folder")
        arguments += [*STUDIES[name], "--data", str(data), "--work", str(tmp_path / "work")]
    if name in DATA:
        arguments += ["--data", str(request.getfixturevalue("data_folder"))]
    subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), *arguments], check=True, timeout=900)
    assert all(table.rows for table in results.read(tmp_path / "result.json").tables)
