"""Mining jobs: shards, parts, resuming, gathering the pairs, documents that cannot be used, and refusals."""

import errno
import gc
import gzip
import json
import os
import pickle
import random
import shutil
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.data.mining import MiningConfig, job, mine
from gerund.data.mining.job import COLUMNS, KEYS, Extent, gather, schema, shards_of
from gerund.data.mining.substrings import normalised
from gerund.errors import (
    ConfigError,
    DataError,
    InputError,
    OutputExistsError,
    ResourceError,
)
from gerund.jobs.checkpoints import WorkingFolder
from gerund.jobs.engine import LocalEngine, prepare
from gerund.training.corpus.pairs import read_examples


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", articles(60))


@pytest.fixture
def output(tmp_path):
    return tmp_path / "pairs.parquet"


# A few documents a part.
SMALL = MiningConfig(part_size=2000)

# fmt: off
WORDS = (
    "river", "bridge", "station", "harbour", "council", "library", "railway", "museum", "orchestra",
    "festival", "cathedral", "mountain", "valley", "castle", "garden", "kingdom", "emperor", "treaty",
    "battle", "regiment", "novel", "painter", "composer", "theatre", "garrison", "harvest", "fishery",
)
# fmt: on


def articles(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Return documents whose sentences sometimes share their title's words or one another's."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        subject = " ".join(draw.sample(WORDS, 2))
        sentences = [f"The {subject} is known since {1000 + number}."]
        for _ in range(draw.randint(0, 9)):
            rest = " ".join(draw.choices(WORDS, k=draw.randint(2, 7)))
            sentences.append(f"The {subject} has a {rest}." if draw.random() < 0.4 else f"Nearby, {rest} was seen.")
        found.append({"title": f"The {subject}", "text": " ".join(sentences)})
    return found


def write_jsonl(path: Path, rows: list[dict[str, str]]) -> Path:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def run(corpus, output, config=SMALL, **more):
    return mine([corpus] if not isinstance(corpus, list) else corpus, output, config, workers=1, show=False, **more)


def rows(output):
    if output.suffix == ".parquet":
        return pq.read_table(output).to_pylist()
    return [json.loads(line) for line in output.read_text().splitlines()]


def shards(files, size=2000):
    return list(shards_of(files, size, text_column="text", title_column="title"))


def sent(shard):
    """Return what another process gets."""
    return pickle.loads(pickle.dumps(shard))


@pytest.fixture
def awkward(tmp_path):
    """Lines of every length, blank ones, a byte order mark, no line end behind the last."""
    file = tmp_path / "awkward.jsonl"
    lines = [b'{"text": "one"}\n', b"\n", b"\r\n", b'{"text": "\xc3\xa4"}\r\n', *[b"broken\n"] * 3, b"\xff\n", b"x"]
    file.write_bytes(b"\xef\xbb\xbf" + b"".join(lines))
    return file


@pytest.mark.parametrize("size", [1, 20, 10**6])
def test_lines_come_back_as_they_were(awkward, tmp_path, size):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(40))
    notes = tmp_path / "note.md"
    notes.write_text("# A note\n\nand its text", "utf-8")
    for shard in shards([awkward, corpus, notes, awkward], size):
        there = sent(shard.by_place())
        assert there.records == []
        assert there.loaded().records == shard.records
        assert there.loaded().digest() == shard.digest()
        assert sent(shard).records == shard.records


def test_a_place_is_a_few_bytes(tmp_path):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(400))
    [shard] = shards([corpus], 10**9)
    assert len(pickle.dumps(shard.by_place())) < 1000 < corpus.stat().st_size < len(pickle.dumps(shard))


def test_tables_and_archives_are_sent(tmp_path):
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "two"]}), table)
    archive = tmp_path / "b.jsonl.gz"
    archive.write_bytes(gzip.compress(b'{"text": "three"}\n'))
    for file in (table, archive):
        [shard] = shards([file])
        assert shard.by_place() is shard
        assert sent(shard).records == shard.records


@pytest.mark.parametrize("spoil", [os.unlink, lambda path: path.write_bytes(path.read_bytes().replace(b"e", b"o"))])
def test_other_documents_are_found_out(tmp_path, spoil):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(3))
    [shard] = shards([corpus], 10**9)
    there = sent(shard.by_place())
    spoil(corpus)
    assert there.loaded() is None
    assert sent(shard.by_place().whole()).loaded().records == shard.records


@dataclass
class Elsewhere:
    """An engine of machines that do not have the corpus."""

    workers: int = 2
    whole: list[bool] = field(default_factory=list)

    @contextmanager
    def pool(self, work, *, folder=None):
        self.work = prepare(pickle.loads(pickle.dumps(work)))
        yield self

    def map(self, given):
        for shard in given:
            there = sent(shard)
            self.whole.append(bool(there.records))
            yield shard, self.work(there)


def test_machines_without_the_corpus_are_sent_the_documents(tmp_path, monkeypatch):
    corpus = write_jsonl(tmp_path / "corpus.jsonl", articles(60))
    mine([corpus], tmp_path / "here.parquet", SMALL, workers=1)

    def missing(extent):
        raise DataError(f"{extent.place}: cannot be read")

    engine = Elsewhere()
    with monkeypatch.context() as patch:
        patch.setattr(Extent, "read", missing)
        mine([corpus], tmp_path / "there.parquet", SMALL, engine=engine)
    assert (tmp_path / "there.parquet").read_bytes() == (tmp_path / "here.parquet").read_bytes()
    assert len(engine.whole) > 3
    assert engine.whole == [False, *[True] * (len(engine.whole) - 1)]


@pytest.mark.slow
def test_processes_read_the_documents_themselves(tmp_path, monkeypatch):
    """Also where the corpus is named by a path from this folder."""
    write_jsonl(tmp_path / "corpus.jsonl", articles(60))
    monkeypatch.chdir(tmp_path)
    seen = []

    class Watched(LocalEngine):
        @contextmanager
        def pool(self, work, *, folder=None):
            with super().pool(work, folder=folder) as inner:
                yield _Watching(inner, seen)

    mine([Path("corpus.jsonl")], tmp_path / "one.parquet", SMALL, workers=1)
    mine([Path("corpus.jsonl")], tmp_path / "two.parquet", SMALL, engine=Watched(2))
    assert (tmp_path / "one.parquet").read_bytes() == (tmp_path / "two.parquet").read_bytes()
    assert len(seen) > 3
    assert all(facts is not None and shard.extents for shard, facts in seen)


@dataclass
class _Watching:
    inner: object
    seen: list

    def map(self, given):
        for one in self.inner.map(given):
            self.seen.append(one)
            yield one


def write_part(path, rows):
    names = (*COLUMNS, *KEYS)
    columns = {name: [row.get(name) for row in rows] for name in names}
    pq.write_table(pa.table(columns, schema=schema({**COLUMNS, **KEYS})), path)
    return path


def row(document, high, low, place=0, text="x"):
    return {"document": document, "key_high": high, "key_low": low, "place": place, "text_a": text}


def gathered(parts, tmp_path):
    target = tmp_path / "out.parquet"
    count = gather(parts, target, tmp_path / "spill")
    found = pq.read_table(target).to_pylist()
    assert (len(found), (tmp_path / "spill").exists()) == (count, False)
    return found


def test_sorted_by_key_and_the_earliest_of_equal_ones(tmp_path):
    big = 2**64 - 1
    first = write_part(tmp_path / "1.parquet", [row(0, big, 1), row(1, 5, 5), row(2, 5, 6, 1), row(2, 5, 6, 0, "y")])
    second = write_part(tmp_path / "2.parquet", [row(3, big, 1), row(4, 5, 7), row(5, 5, 5), row(6, 0, big)])
    empty = write_part(tmp_path / "3.parquet", [])
    found = gathered([first, empty, second], tmp_path)
    assert [(one["document"], one["text_a"]) for one in found] == [(6, "x"), (1, "x"), (2, "y"), (4, "x"), (0, "x")]


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [1, 100, 2**20])
def test_the_same_through_any_number_of_buckets(tmp_path, monkeypatch, bucket):
    monkeypatch.setattr(job, "_BUCKET", bucket)
    monkeypatch.setattr(job, "_ROWS", 7)
    draw = random.Random(0)
    rows = [row(number, draw.getrandbits(64), draw.getrandbits(64), text=str(number)) for number in range(2000)]
    # The second half repeats keys of the first.
    rows += [{**draw.choice(rows), "document": number} for number in range(2000, 3000)]
    parts = [write_part(tmp_path / f"{number}.parquet", rows[number * 500 :][:500]) for number in range(6)]
    found = gathered(parts, tmp_path)
    order = sorted(rows[:2000], key=lambda one: (one["key_high"], one["key_low"]))
    assert [one["text_a"] for one in found] == [one["text_a"] for one in order]
    assert {one["document"] for one in found} == set(range(2000))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_pairs(tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_BUCKET", 2**20)
    draw = random.Random(0)
    parts = []
    for number in range(40):
        # Long texts that do not get smaller by packing: 80 MB of them.
        rows = [row(number, draw.getrandbits(64), 0, place, draw.randbytes(10_000).hex()) for place in range(100)]
        parts.append(write_part(tmp_path / f"{number}.parquet", rows))
    pool = pa.proxy_memory_pool(pa.default_memory_pool())
    usual = pa.default_memory_pool()
    pa.set_memory_pool(pool)
    try:
        assert gather(parts, tmp_path / "out.parquet", tmp_path / "spill") == 4000
    finally:
        pa.set_memory_pool(usual)
    assert pool.max_memory() < 20e6


def working(output):
    return output.with_name(f"{output.name}.parts")


def stopped_after(monkeypatch, count, error=KeyboardInterrupt):
    """Let ``count`` parts be made, then stop."""
    own, made = job.make_part, []

    def make_part(*given):
        if len(made) == count:
            raise error() if isinstance(error, type) else error
        made.append(1)
        return own(*given)

    monkeypatch.setattr(job, "make_part", make_part)


class TestOutput:
    @pytest.mark.parametrize("collects", [True, False])
    def test_the_collector_is_as_it_was(self, corpus, output, collects):
        was = gc.isenabled()
        (gc.enable if collects else gc.disable)()
        try:
            run(corpus, output)
            found = gc.isenabled()
        finally:
            (gc.enable if was else gc.disable)()
        assert found == collects

    def test_rows(self, corpus, output):
        mined = run(corpus, output)
        found = rows(output)
        assert list(found[0]) == list(job.COLUMNS)
        assert (mined.pairs, mined.documents, mined.errors) == (len(found), 60, 0)
        assert mined.found == mined.pairs + mined.duplicates
        assert 0 < mined.pairs <= mined.candidates <= mined.sentences
        texts = [json.loads(line) for line in corpus.read_text().splitlines()]
        for row in found:
            document = texts[row["document"]]
            assert (row["file"], row["line"]) == (corpus.name, row["document"] + 1)
            assert (row["text_a"], row["start_a"], row["end_a"]) == (document["title"], -1, -1)
            assert document["text"][row["start_b"] : row["end_b"]] == row["text_b"]
            assert row["weight"] >= 30
            assert row["span"] in normalised(row["text_a"])
            assert row["span"] in normalised(row["text_b"])
        openings = [(row["document"], row["opening"]) for row in found if row["opening"] is not None]
        assert all(texts[document]["text"].startswith(opening) for document, opening in openings)
        # Each document has one, in one of its rows.
        assert sorted(document for document, _ in openings) == sorted({row["document"] for row in found})
        assert not working(output).exists()

    def test_is_shuffled_by_the_seed_alone(self, corpus, tmp_path):
        found = []
        for seed in (0, 1):
            run(corpus, tmp_path / f"{seed}.parquet", MiningConfig(seed=seed))
            found.append(rows(tmp_path / f"{seed}.parquet"))
        order = [row["document"] for row in found[0]]
        assert order != sorted(order)
        assert found[0] != found[1]
        assert sorted(map(str, found[0])) == sorted(map(str, found[1]))

    @pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
    def test_is_read_by_the_training(self, corpus, tmp_path, ending):
        output = tmp_path / f"pairs{ending}"
        mined = run(corpus, output)
        examples = read_examples([output], query="text_a", positive="text_b")
        assert [(one.query, one.positive) for one in examples] == [(r["text_a"], r["text_b"]) for r in rows(output)]
        assert len(examples) == mined.pairs

    def test_each_pair_once_and_the_earliest(self, tmp_path, output):
        one = {"title": "The stone bridge", "text": "The stone bridge is old. Nobody comes."}
        swapped = {"title": "The stone bridge IS old.", "text": "The stone bridge"}
        other = {"title": "The stone bridge", "text": "The stone bridge is new."}
        corpus = write_jsonl(tmp_path / "c.jsonl", [one, other, swapped, one])
        mined = run(corpus, output, MiningConfig(part_size=1))
        assert (mined.found, mined.duplicates, mined.pairs) == (4, 2, 2)
        assert sorted(row["document"] for row in rows(output)) == [0, 1]


class TestFormats:
    def test_a_txt_file_is_a_document_titled_by_its_name(self, tmp_path, output):
        (tmp_path / "Spike is chasing.txt").write_text("Look, spike is chasing Tom. Nobody laughs.")
        run(tmp_path / "Spike is chasing.txt", output)
        [row] = rows(output)
        assert (row["text_a"], row["text_b"], row["line"]) == ("Spike is chasing", "Look, spike is chasing Tom.", 1)

    def test_other_columns(self, tmp_path, output):
        corpus = write_jsonl(tmp_path / "c.jsonl", [{"name": "The stone bridge", "body": "The stone bridge is old."}])
        assert run(corpus, output, text_column="body", title_column="name").pairs == 1

    @pytest.mark.slow
    def test_megabytes_in_a_line(self, tmp_path, output):
        draw = random.Random(0)
        word = ["".join(draw.choices("abcdefghij", k=8)) for _ in range(2000)]
        text = " ".join(draw.choices(word, k=280_000))
        corpus = write_jsonl(tmp_path / "c.jsonl", [{"title": f"{word[0]} {word[1]}", "text": text}, *articles(5)])
        assert len(text) > 2_400_000
        assert run(corpus, output, MiningConfig()).documents == 6


class TestSameBytes:
    @pytest.fixture
    def whole(self, corpus, tmp_path):
        output = tmp_path / "whole.parquet"
        run(corpus, output)
        return output.read_bytes()

    @pytest.mark.parametrize("count", [1, 3])
    def test_after_an_interruption(self, corpus, output, whole, monkeypatch, count):
        with monkeypatch.context() as patch:
            stopped_after(patch, count)
            with pytest.raises(KeyboardInterrupt) as caught:
                run(corpus, output)
        assert "give --resume to go on from there" in caught.value.__notes__[0]
        assert not output.exists()
        mined = run(corpus, output, resume=True)
        assert mined.resumed_parts == count
        assert output.read_bytes() == whole
        assert not working(output).exists()

    def test_with_a_part_missing_or_broken(self, corpus, output, whole, monkeypatch):
        with monkeypatch.context() as patch:
            stopped_after(patch, 4)
            with pytest.raises(KeyboardInterrupt):
                run(corpus, output)
        first, second, third, _ = sorted(working(output).glob("part-*"))
        first.unlink()
        second.write_bytes(second.read_bytes()[:-20])
        shutil.copy(third, working(output) / "part-000099.parquet")
        # The stray one is of no shard of this corpus.
        assert run(corpus, output, resume=True).resumed_parts == 2
        assert output.read_bytes() == whole

    def test_after_being_killed_at_the_very_end(self, corpus, output, whole, monkeypatch):
        def killed(folder):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(WorkingFolder, "remove", killed)
            with pytest.raises(KeyboardInterrupt):
                run(corpus, output)
        assert output.read_bytes() == whole
        with pytest.raises(OutputExistsError):
            run(corpus, output)
        run(corpus, output, resume=True)
        assert output.read_bytes() == whole
        assert not working(output).exists()

    def test_nothing_to_resume(self, corpus, output, whole):
        assert run(corpus, output, resume=True).resumed_parts == 0
        assert output.read_bytes() == whole


class TestUnfinishedWork:
    @pytest.fixture(autouse=True)
    def begun(self, corpus, output, monkeypatch):
        with monkeypatch.context() as patch:
            stopped_after(patch, 2)
            with pytest.raises(KeyboardInterrupt):
                run(corpus, output)

    def test_is_not_thrown_away_unasked(self, corpus, output):
        with pytest.raises(OutputExistsError, match="unfinished work; give --resume to continue it, or --force"):
            run(corpus, output)
        assert run(corpus, output, force=True).resumed_parts == 0

    @pytest.mark.parametrize(
        "change, message",
        [
            (dict(config=MiningConfig(part_size=2000, threshold=40)), "threshold was 30 and is 40"),
            (dict(config=MiningConfig(part_size=2000, seed=1)), "seed was 0 and is 1"),
            (dict(text_column="title"), "text_column was 'text' and is 'title'"),
        ],
    )
    def test_of_other_settings_is_refused(self, corpus, output, change, message):
        with pytest.raises(InputError, match=f"does not match: {message}"):
            run(corpus, output, resume=True, **change)
        assert len(list(working(output).glob("part-*"))) == 2
        assert run(corpus, output, force=True, config=MiningConfig(threshold=31)).resumed_parts == 0

    def test_of_another_version_is_refused(self, corpus, output):
        (working(output) / "manifest.json").write_text('{"settings": {}, "files": []}')
        with pytest.raises(InputError, match="unfinished work of another version of gerund; give --force"):
            run(corpus, output, resume=True)
        assert run(corpus, output, force=True).resumed_parts == 0

    def test_of_a_shard_with_other_documents_is_made_anew(self, corpus, output, monkeypatch):
        # As if the corpus had been another one for a while, and is again what the manifest says.
        first = sorted(working(output).glob("part-*"))[0]
        facts = job.read_facts(first)
        job.write_part(first, {name: [] for name in (*job.COLUMNS, *job.KEYS)}, replace(facts, shard="other"))
        assert run(corpus, output, resume=True).resumed_parts == 1

    def test_of_other_files_is_refused(self, corpus, output):
        write_jsonl(corpus, articles(60, seed=1))
        with pytest.raises(InputError, match="the files of the corpus have changed"):
            run(corpus, output, resume=True)


def test_a_corpus_that_changes_on_the_way_is_not_mixed(corpus, output, monkeypatch):
    own = job.make_part

    def make_part(*given):
        content = corpus.read_text()
        corpus.write_text(content.replace("river", "gorge"))
        return own(*given)

    with monkeypatch.context() as patch:
        patch.setattr(job, "make_part", make_part)
        with pytest.raises(DataError, match="the files of the corpus have changed while they were read"):
            run(corpus, output)
    assert not output.exists()
    assert not working(output).exists()


class TestFullDisk:
    @pytest.mark.parametrize("at", [1, 2, 4, 9, 15, 24])
    def test_keeps_what_is_finished_and_goes_on(self, corpus, output, tmp_path, monkeypatch, at):
        calls = 0
        own = os.fsync

        def full(handle):
            nonlocal calls
            calls += 1
            if calls >= at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            own(handle)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(ResourceError, match="No space left on device") as caught:
                run(corpus, output)
        kept = len(list(working(output).glob("part-*")))
        assert ("give --resume to go on" in str(caught.value)) == (kept > 0) == working(output).exists()
        assert not list(tmp_path.rglob(".*")), "no half-written file may take up space"
        assert run(corpus, output, resume=True).resumed_parts == kept

    def test_while_sorting(self, corpus, output, monkeypatch):
        def full(*given):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(job, "_distribute", full)
            with pytest.raises(ResourceError, match=r"could not be sorted: No space left.*give --resume"):
                run(corpus, output)
        assert not (working(output) / "spill").exists()
        assert run(corpus, output, resume=True).pairs > 0


class TestBadDocuments:
    LINES = (
        b'{"title": "The stone bridge", "text": "The stone bridge is old. Nobody comes."}',
        b'{"text": "half',
        b'{"text": "\xff\xfe"}',
        b"",
        b'{"text": null}',
        b'{"text": "\\u0000\\u0001 \\u0007"}',
        b'{"text": "  "}',
        b'{"title": "no text"}',
        b"[1, 2]",
        b'{"text": "\\ud800"}',
        b"[" * 100_000,
        b'{"title": "The stone bridge", "text": "The stone bridge is new. One more."}',
    )

    def test_are_counted_and_listed(self, tmp_path, output):
        corpus = tmp_path / "c.jsonl"
        corpus.write_bytes(b"\n".join(self.LINES))
        mined = run(corpus, output, MiningConfig(part_size=100))
        assert (mined.documents, mined.pairs, mined.errors) == (2, 2, 9)
        listed = [json.loads(line) for line in (tmp_path / "pairs.errors.jsonl").read_text().splitlines()]
        assert mined.errors_file == tmp_path / "pairs.errors.jsonl"
        assert len(mined.first_errors) == 5
        assert [error["line"] for error in listed] == [2, 3, 5, 6, 7, 8, 9, 10, 11]
        assert {error["file"] for error in listed} == {str(corpus)}
        for error, reason in zip(
            listed,
            [
                "not valid JSON",
                "not valid UTF-8 at byte 10",
                "'text' is not a text but NoneType",
                "the text has nothing but control characters",
                "the text is empty",
                "no field 'text'; present are: title",
                "expected a JSON object, found list",
                "'text' holds a lone surrogate at character 0",
                "not valid JSON",
            ],
            strict=True,
        ):
            assert error["reason"].startswith(reason)
        # Documents are numbered with the bad ones.
        assert sorted((row["document"], row["line"]) for row in rows(output)) == [(0, 1), (10, 12)]

    def test_a_broken_file_does_not_stop_the_others(self, tmp_path, corpus, output):
        broken = tmp_path / "a.jsonl.gz"
        broken.write_bytes(gzip.compress(corpus.read_bytes())[:-200])
        (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
        pq.write_table(pa.table({"body": ["x"]}), tmp_path / "c.parquet")
        mined = run([broken, tmp_path / "b.parquet", tmp_path / "c.parquet", corpus], output)
        assert [error.reason.split(" (")[0] for error in mined.first_errors] == [
            "broken or truncated archive",
            "not a readable parquet file",
            "no column 'text'; present are: body",
        ]
        assert mined.documents >= 60

    def test_the_list_of_an_earlier_run_is_no_leftover(self, tmp_path, corpus, output):
        errors = tmp_path / "pairs.errors.jsonl"
        errors.write_text("{}\n")
        with pytest.raises(OutputExistsError, match=r"errors\.jsonl exists already"):
            run(corpus, output)
        assert run(corpus, output, force=True).errors_file is None
        assert not errors.exists()


class TestRefusals:
    @pytest.fixture
    def refused(self, tmp_path, output):
        def refuse(error, message, corpus, *, output=output, **more):
            before = sorted(tmp_path.rglob("*"))
            with pytest.raises(error, match=message):
                run(corpus, output, **more)
            assert sorted(tmp_path.rglob("*")) == before, "a refusal leaves nothing behind"

        return refuse

    def test_an_empty_corpus(self, refused, tmp_path):
        corpus = tmp_path / "c.jsonl"
        corpus.write_bytes(b"\n\n")
        refused(DataError, "^there is no document to mine$", corpus)
        corpus.write_bytes(b"{}\n{}\n")
        refused(
            DataError, r"mine; 2 documents could not be used, the first: .*c\.jsonl, line 1: no field 'text'", corpus
        )
        refused(DataError, "there is no file to mine", [])

    def test_a_corpus_without_pairs(self, refused, tmp_path):
        corpus = write_jsonl(tmp_path / "c.jsonl", [{"text": "One sentence."}, {"text": "Two of them. Or not."}])
        refused(DataError, "^no two sentences of 2 documents are a pair by these settings$", corpus)

    def test_files(self, refused, tmp_path, corpus, output):
        refused(DataError, "absent.jsonl: no such file", tmp_path / "absent.jsonl")
        (tmp_path / "c.docx").write_bytes(b"x")
        refused(DataError, "c.docx: unknown file format; valid endings are", tmp_path / "c.docx")
        refused(ConfigError, "file that ends in .parquet or .jsonl", corpus, output=tmp_path / "pairs.csv")
        refused(InputError, "is a file of the corpus; choose another output", corpus, output=corpus, force=True)
        output.mkdir()
        refused(InputError, "is a folder; choose another output", corpus)

    def test_an_output_that_is_there(self, refused, corpus, output):
        output.write_bytes(b"mine")
        refused(OutputExistsError, "exists already; choose another name or give --force to replace it", corpus)
        assert run(corpus, output, force=True).pairs > 0

    @pytest.mark.parametrize("name", ["pairs.parquet", "pairs.errors.jsonl"])
    def test_a_symbolic_link(self, refused, corpus, output, name, tmp_path):
        (tmp_path / "real").write_text("precious")
        (tmp_path / name).symlink_to("real")
        refused(InputError, f"{name} is a symbolic link to real; name the file itself", corpus, force=True)
        assert (tmp_path / "real").read_text() == "precious"

    def test_one_that_comes_up_meanwhile(self, corpus, output, monkeypatch):
        own = job.gather

        def gather(*given, **more):
            output.write_bytes(b"someone else's")
            return own(*given, **more)

        monkeypatch.setattr(job, "gather", gather)
        with pytest.raises(OutputExistsError):
            run(corpus, output)
        assert output.read_bytes() == b"someone else's"

    def test_workers(self, corpus, output):
        with pytest.raises(ConfigError, match="got 0"):
            mine([corpus], output, workers=0)
