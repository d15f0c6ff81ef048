"""``gerund index``, ``search`` and ``ask``: from files to hits, and every mistake in a sentence."""

import json
import shutil
from pathlib import Path

import pytest

import gerund
from gerund.retrieval import lance_store
from tests.cli.helpers import no_loading, run_cli

TEXTS = {
    "bread.md": "# Bread\n\nBread is made of flour, water and salt. Yeast makes the dough rise.\n",
    "rail.txt": "The railway was opened in 1825. It ran to Darlington.\n",
    "table.jsonl": '{"_id": "t1", "text": "Tea is drunk hot.", "title": "Tea"}\n',
}


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_folder):
    """Make an index with the command line; returns the folder it lies in."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "notes").mkdir()
    for name, text in TEXTS.items():
        (folder / "notes" / name).write_text(text)
    ran = run_cli(
        "index", folder / "notes", "-o", folder / "my.index", "-m", tiny_folder, "--chunk-tokens", 40, "--json"
    )
    assert ran.code == 0, ran.err
    told = json.loads(ran.out)
    assert (told["files"], told["documents"], told["failed"]) == (3, 3, [])
    assert "3 files, 3 documents stored" in ran.err
    return folder


@pytest.fixture
def folder(made, tmp_path):
    """Return a copy that a test may change."""
    return shutil.copytree(made, tmp_path / "copy")


def lines(ran):
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.split("\n") if line]


def test_what_has_not_changed_needs_no_model(folder):
    with no_loading():
        ran = run_cli("index", folder / "notes", "-o", folder / "my.index")
    assert ran.code == 0, ran.err
    assert "3 files, 0 documents stored (0 chunks), 3 files unchanged" in ran.err


def test_the_last_step_of_a_run_that_was_killed_is_made_up_for(folder, monkeypatch):
    (folder / "notes" / "rail.txt").write_text("Trains need rails.\n")
    with monkeypatch.context() as patched:
        patched.setattr(lance_store.LanceStore, "tidy", lambda _self: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run_cli("index", folder / "notes", "-o", folder / "my.index").code != 0
    killed = shutil.copytree(folder, folder.with_name("killed"))
    assert not lance_store.LanceStore(folder / "my.index").is_tidy()
    for place, command in ((folder, ["index", "notes", "-o", "my.index"]), (killed, ["search", "my.index", "rails"])):
        monkeypatch.chdir(place)
        more = ["--mode", "words"] if command[0] == "search" else []
        assert "an earlier gerund index was ended before its last step" in run_cli(*command, *more).err
        assert lance_store.LanceStore(place / "my.index").is_tidy()
        assert "ended before its last step" not in run_cli(*command, *more).err


@pytest.mark.slow
def test_search(made):
    with no_loading():
        [hit] = lines(run_cli("search", made / "my.index", "flour", "--mode", "words", "--json"))
    assert (hit["source"], hit["rank"], hit["heading"], hit["similarity"]) == ("notes/bread.md", 1, "Bread", None)
    assert TEXTS["bread.md"][hit["start"] : hit["end"]] == hit["text"]
    found = lines(run_cli("search", made / "my.index", "flour", "tea", "-k", 2, "--json"))
    assert [(one["query"], one["rank"]) for one in found] == [("flour", 1), ("flour", 2), ("tea", 1), ("tea", 2)]
    piped = run_cli("search", made / "my.index", "-", "-k", 2, "--json", stdin="flour\n\ntea\n")
    assert lines(piped) == found
    [hit] = lines(run_cli("search", made / "my.index", "hot", "--filter", "title = 'Tea'", "--json"))
    assert hit["source"] == "notes/table.jsonl#t1"


def test_hits_are_shown_with_the_place_where_they_stand(made):
    ran = run_cli("search", made / "my.index", "railways opened", "--mode", "words")
    assert ran.code == 0
    first, second, *_ = ran.out.splitlines()
    assert first.startswith(" 1  ")
    assert first.endswith("notes/rail.txt:0-31  rail")
    assert second == "    The railway was opened in 1825."
    nothing = run_cli("search", made / "my.index", "zebra", "--mode", "words")
    assert (nothing.code, nothing.out) == (0, "")
    assert "nothing was found for 'zebra'" in nothing.err


def test_words_are_highlighted_where_most_of_them_stand():
    from gerund.cli.search import highlighted

    text = "x " * 300 + "the old railways were opened " + "y " * 300
    shown = highlighted(text, "When did the railway open?")
    assert shown.plain.startswith("... ")
    assert shown.plain.endswith(" ...")
    assert [shown.plain[one.start : one.end] for one in shown.spans] == ["railways", "opened"]
    assert highlighted("short", "nothing").plain == "short"


@pytest.mark.slow
def test_ask(made):
    ran = run_cli("ask", made / "my.index", "When was the railway opened?")
    assert ran.code == 0, ran.err
    answer, empty, source = ran.out.splitlines()
    assert answer.startswith("The railway was opened in 1825. [")
    assert (empty, source[3:]) == ("", " notes/rail.txt:0-31  rail")
    told = json.loads(run_cli("ask", made / "my.index", "-", "--json", stdin="What makes dough rise?\n").out)
    assert told["text"] == "Yeast makes the dough rise."
    assert gerund.Answer.from_dict(told).to_dict() == told
    every = run_cli("ask", made / "my.index", "What makes dough rise?", "--sources", "--extractive").out
    assert all(f"[{number}] notes/" in every for number in (1, 2, 3))
    several = "What makes dough rise?\n\nWhen was the railway opened?\n"
    assert "standard input has 2 lines; --chat answers each" in run_cli("ask", made / "my.index", stdin=several).mistake
    nothing = run_cli("ask", made / "my.index", "Who is the king of Norway?")
    assert (nothing.code, nothing.out) == (1, "Nothing was found about this question.\n")


@pytest.mark.slow
def test_instructions_are_for_generated_answers(made, monkeypatch):
    from gerund.retrieval.answer_generation import Prompter

    told, adding = [], Prompter.adding
    monkeypatch.setattr(Prompter, "adding", lambda self, more: told.append(more) or adding(self, more))
    model = Path(gerund.__file__).parent / "assets" / "default"  # the tiny model has no room for instructions
    asked = ["ask", made / "my.index", "What makes dough rise?"]
    generated = [*asked, "--answer-with", model, "--generate", "--max-new-tokens", 4]
    assert run_cli(*generated, "--instructions", "Answer in verse.").code == 0
    assert set(told) == {"Answer in verse."}
    quoted = run_cli(*asked, "--instructions", "Answer in verse.")
    assert quoted.out.startswith("Yeast makes the dough rise.")
    assert "the instructions had no effect; --generate" in quoted.err
    assert "--extractive quotes" in run_cli(*asked, "--extractive", "--instructions", "Answer in verse.").mistake


@pytest.mark.slow
def test_another_encoder_is_refused_and_the_index_migrated(folder, tiny_folder):
    index = folder / "my.index"
    other = ["-m", tiny_folder, "--attention", "causal"]
    refused = run_cli("index", folder / "notes", "-o", index, *other)
    assert "was made with" in refused.mistake
    assert "--migrate" in refused.mistake
    assert "is cut into chunks of 40 tokens" in run_cli("index", folder / "notes", "-o", index, "--late").mistake
    before = lines(run_cli("search", index, "flour", "--json"))
    shutil.rmtree(folder / "notes")  # texts come from the index
    ran = run_cli("index", "-o", index, "--migrate", *other, "--late", "--chunk-tokens", 30)
    assert ran.code == 0, ran.err
    assert "3 documents re-embedded" in ran.err
    opened = gerund.open_index(index)
    assert opened.chunking == gerund.Chunking(tokens=30, late=True)
    assert opened.lm.encoder.attention.name == "causal"
    after = lines(run_cli("search", index, "flour", "--json"))
    assert after[0]["source"] == before[0]["source"]
    assert after[0]["similarity"] != before[0]["similarity"]
    again = run_cli("index", "-o", index, "--migrate", "--json")
    assert "0 documents re-embedded" in again.err
    assert json.loads(again.out) == {"index": str(index), "chunks_in_all": len(opened)}


@pytest.mark.slow
def test_small_vectors_are_stored_and_migrated_to(folder, tiny_folder):
    index = folder / "my.index"
    assert "is cut into" in run_cli("index", folder / "notes", "-o", index, "--precision", "binary").mistake
    ran = run_cli("index", "-o", index, "--migrate", "--precision", "binary", "--transform", "truncate-16")
    assert ran.code == 0, ran.err
    about = gerund.open_index(index).about
    assert (about.dimensions, about.chunking.precision) == (16, "binary")
    assert "3 files unchanged" in run_cli("index", folder / "notes", "-o", index).err
    [first, *_] = lines(run_cli("search", index, "flour", "--mode", "vectors", "--json"))
    assert -1 <= first["similarity"] <= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["index", "-o", "new"], "name the files or folders to index"),
        (["index", "-o", "my.index", "--migrate", "--prune"], "--prune removes what lay in PATHS"),
        (["index", "-o", "new", "--migrate"], "there is no index yet, so nothing to migrate"),
        (["ask", "my.index", "Why?", "--cache", "new"], "--cache is for a --document, or for an index with"),
        (["index", "nowhere", "-o", "my.index"], "nowhere: no such file or folder"),
        (["index", "empty", "-o", "my.index"], "there is no file to read"),
        (["index", "notes", "-o", "notes"], "notes is not an index: it contains"),
        (["index", "notes", "-o", "notes/rail.txt"], "is a file; an index is a folder"),
        (["index", "notes", "-o", "new", "--chunk-tokens", 0], "`tokens` must be at least 1, got 0"),
        (["index", "notes", "-o", "new", "--language", "e.n"], "is not a language code such as en"),
        (["index", "notes", "-o", "new", "--precision", "int8"], "valid are: float32, float16, binary"),
        (["index", "notes", "-o", "new", "--transform", "truncate-9999"], "truncate-9999: a vector has"),
        (["search", "empty", "x"], "there is no index in it"),
        (["search", "my.index"], "give a query"),
        (["search", "my.index", ""], "the query is empty"),
        (["search", "my.index", "-"], "standard input has no query"),
        (["search", "my.index", "x", "--filter", "tokens > 5 tokens < 3"], "at character 12: 'tokens' is not expected"),
        (["search", "my.index", "x", "--rerank", 3, "--rerank-by", "own"], "was not trained to score"),
        (["search", "my.index", "x", "-m", "default"], "was made with"),
        (["ask", "my.index", " "], "the question is empty"),
        (["ask"], "name an index, or a file with --document"),
        (["ask", "my.index", "one", "two"], "one question at a time, in quotes: 'one' 'two'"),
        (["ask", "my.index", "x", "--generate", "--max-new-tokens", 0], "must be at least 1"),
        (["ask", "--document", "notes", "x"], "notes: a folder, not a document"),
        (["ask", "--document", "notes/rail.txt", "x", "--cache-size", "much"], "a size is a number with a unit"),
        (["ask", "my.index", "-"], "standard input has no question"),
    ],
)
def test_mistakes_are_told_in_a_sentence(made, monkeypatch, arguments, message):
    monkeypatch.chdir(made)
    (made / "empty").mkdir(exist_ok=True)
    assert message in run_cli(*arguments).mistake
    assert not (made / "new").exists()


def test_files_that_are_not_read_are_counted(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "b.rtf", "c.RTF", "d", ".hidden.rtf"):
        (tmp_path / name).write_text("Bread is made of flour.")
    for _ in range(2):  # the second time the index lies in there too
        ran = run_cli("index", ".", "-o", "my.index", "-m", tiny_folder, "--chunk-tokens", 20)
        assert "gerund: skipped 3 files of unsupported types: 2 .rtf, 1 no ending\n" in ran.err
        assert "1 file, " in ran.err
    assert "unsupported types" not in run_cli("index", "a.txt", "-o", "my.index").err


def test_one_model_in_two_ways_is_told_apart(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("Bread is made of flour.")
    how = ("index", "a.txt", "-o", "my.index", "-m", tiny_folder, "--chunk-tokens", 20)
    assert run_cli(*how, "--transform", "truncate-16").code == 0
    assert "): transform truncate-16, not truncate-8; open it" in run_cli(*how, "--transform", "truncate-8").mistake


def test_a_template_and_a_fitted_transform_belong_to_the_index(tmp_path, tiny_folder):
    (tmp_path / "a.txt").write_text("Bread is made of flour.")
    (tmp_path / "b.txt").write_text("Trains run on rails.")
    sample = tmp_path / "sample.txt"
    sample.write_text("\n".join(f"the {word} in the inn" for word in ("cat", "tin", "rain", "hen", "thing", "other")))
    method = {"template": "{text} is:", "transform": "all-but-the-top-1", "pooling": "last"}
    more = [part for name, value in method.items() for part in (f"--{name}", value)]
    place = tmp_path / "my.index"
    ran = run_cli(
        "index", tmp_path / "a.txt", tmp_path / "b.txt", "-o", place, "-m", tiny_folder, *more,
        *("--sample", sample, "--chunk-tokens", 30, "--dtype", "float32"),
    )  # fmt: skip
    assert ran.code == 0, ran.err
    ran = run_cli("search", place, "flour", "--mode", "vectors", "--json")
    found = {Path(hit["source"]).name: hit["similarity"] for hit in map(json.loads, ran.out.splitlines())}
    lm = gerund.load(tiny_folder, **method, sample=sample, dtype="float32")
    wanted = lm.similarity("flour", [(tmp_path / name).read_text() for name in ("a.txt", "b.txt")])[0]
    assert found == pytest.approx(dict(zip(("a.txt", "b.txt"), wanted.tolist(), strict=True)), abs=1e-4)


@pytest.mark.parametrize("query", ["the of and", "foo AND (", 'a:b"', "+x -y *", "' OR 1=1 --", "\\", "?"])
def test_no_query_is_a_mistake(made, query):
    for mode in ("words", "hybrid"):
        ran = run_cli("search", made / "my.index", query, "--mode", mode, "--json")
        assert (ran.code, "error" in ran.err) == (0, False)


@pytest.mark.parametrize(
    ("said", "code", "message"),
    [
        ("IO error: No space left on device (os error 28)", 1, "cannot be written: IO error: No space left on device"),
        ("LanceError(IO): Permission denied (os error 13), /x.rs:1", 2, "cannot be read or written: Permission denied"),
    ],
)
def test_a_disk_that_refuses(folder, monkeypatch, said, code, message):
    def refuse(*_arguments):
        raise OSError(f"lance error: {said}")

    monkeypatch.setattr(lance_store, "arrow_rows", refuse)
    (folder / "notes" / "new.txt").write_text("Quite new.\n")
    ran = run_cli("index", folder / "notes", "-o", folder / "my.index")
    assert ran.code == code
    assert message in ran.err
    assert ran.err.count("\n") == 1


def test_the_machine_can_be_named_without_the_model(folder):
    index = folder / "my.index"
    for command in (["search", index, "bread"], ["ask", index, "What is bread made of?"]):
        assert run_cli(*command, "--device", "cpu").code == 0
        assert "cuda:77" in run_cli(*command, "--device", "cuda:77").mistake


def test_queries_end_at_line_ends_alone(folder, monkeypatch):
    ran = run_cli("search", folder / "my.index", "-", "--mode", "words", "--json", stdin="bread\u2028water\nrailway\n")
    assert {one["query"] for one in lines(ran)} == {"bread\u2028water", "railway"}


# A broken document of each kind that needs a parser.
BROKEN = {
    "a.docx": b"PK\x03\x04 broken",
    "a.epub": b"PK",
    "a.pdf": b"%PDF-1.4 broken",
    "a.html": b"<div>" * 3000 + b"x",
    "a.md.gz": b"\x1f\x8b broken",
}


@pytest.mark.slow
def test_a_broken_document_is_reported_and_all_others_are_indexed(folder):
    for name, content in BROKEN.items():
        (folder / "notes" / name).write_bytes(content)
    (folder / "notes" / "page.html").write_text("<p>Cheese is made of milk.</p>")
    (folder / "notes" / "rail.txt").unlink()
    ran = run_cli("index", folder / "notes", "-o", folder / "my.index", "--prune", "--json", "--read-seconds", 20)
    assert ran.code == 2
    told = json.loads(ran.out)
    assert (told["documents"], told["unchanged"], told["removed"]) == (1, 2, 1)
    assert sorted(Path(one["file"]).name for one in told["failed"]) == sorted(BROKEN)
    assert "a.pdf: not a readable PDF" in ran.err
    assert "Traceback" not in ran.err
    found = lines(run_cli("search", folder / "my.index", "milk", "--mode", "words", "--json"))
    assert [one["source"] for one in found] == ["notes/page.html"]
    for name in ("a.docx", "a.pdf"):
        ran = run_cli("ask", "--document", folder / "notes" / name, "What is cheese made of?")
        assert ran.code == 2
        assert f"{name}: not a readable" in ran.err


@pytest.mark.parametrize(
    ("option", "value"), [("--read-seconds", "0"), ("--read-memory", "much"), ("--read-memory", "1MB")]
)
def test_impossible_limits(folder, option, value):
    with no_loading():
        for command in (["index", folder / "notes", "-o", "out"], ["adapt", "--texts", folder / "notes", "--dry-run"]):
            assert run_cli(*command, option, value).code == 2
