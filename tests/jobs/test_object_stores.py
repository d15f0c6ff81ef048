"""Inputs on object stores are copied once, outputs sent when they are whole."""

import errno
from contextlib import suppress
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gerund.errors import ConfigError, DataError, GerundError, MissingDependencyError, OutputExistsError, ResourceError
from gerund.jobs import object_stores
from gerund.jobs.object_stores import Staged, staged
from tests.cli.helpers import run_cli


@pytest.fixture
def bucket():
    """An object store in memory."""
    store = fsspec.filesystem("memory")
    store.pipe_file("/bucket/in.txt", b"one text\nanother text\n")
    store.pipe_file("/bucket/folder/a/one.txt", b"one")
    store.pipe_file("/bucket/folder/two.txt", b"two")
    store.pipe_file("/bucket/folder/.hidden", b"x")
    yield store
    store.rm("/bucket", recursive=True)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_comes_and_goes(bucket, tmp_path):
    with staged(["memory://bucket/in.txt"], "memory://bucket/out/out.txt", work=tmp_path) as place:
        [source] = place.sources
        assert Path(source).read_bytes() == b"one text\nanother text\n"
        assert place.output.parent.parent == tmp_path
        place.output.write_bytes(b"whole")
        assert place.send([place.output]) == ["memory://bucket/out/out.txt"]
    assert bucket.cat_file("/bucket/out/out.txt") == b"whole"
    assert names(tmp_path) == []


def test_a_name_that_leads_out_of_its_folder_is_refused(bucket, tmp_path):
    bucket.pipe_file("/bucket/folder/../../../evil.txt", b"x")
    try:
        with pytest.raises(DataError, match="a name in it leads out of it"):  # noqa: SIM117
            with staged(["memory://bucket/folder"], tmp_path / "out.txt", work=tmp_path / "a" / "b"):
                pass
    finally:
        bucket.rm_file("/bucket/folder/../../../evil.txt")
    assert not list(tmp_path.rglob("evil.txt"))


def test_what_is_on_this_machine_is_left_where_it_is(tmp_path):
    with staged(["in.txt", "-"], tmp_path / "out.txt") as place:
        assert place.sources == ["in.txt", "-"]
        assert place.output == tmp_path / "out.txt"
        place.output.write_bytes(b"whole")
        assert place.send([place.output]) == [str(tmp_path / "out.txt")]
    assert names(tmp_path) == ["out.txt"]


def test_work_elsewhere(tmp_path):
    with staged(["in.txt"], tmp_path / "far" / "out.txt", work=tmp_path / "near") as place:
        place.output.write_bytes(b"whole")
        place.send([place.output])
    assert (tmp_path / "far" / "out.txt").read_bytes() == b"whole"
    assert names(tmp_path / "near") == []


def test_work_elsewhere_for_an_output_below_the_root(tmp_path):
    sent = []
    place = Staged([], tmp_path / "out.unsent" / "out.txt", "/out.txt")
    place.output.parent.mkdir()
    place.output.touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_stores, "_send", lambda _, target: sent.append(target))
        assert place.send([place.output]) == sent == ["/out.txt"]


def test_a_folder(bucket, tmp_path):
    with staged(["memory://bucket/folder/"], tmp_path / "out") as place:
        [folder] = place.sources
        found = {str(path.relative_to(folder)) for path in tmp_path.rglob("*.txt")}
    assert found == {"a/one.txt", "two.txt"}
    assert names(tmp_path) == []


def test_copies_stay_after_an_error_and_are_made_again_where_the_store_has_others(bucket, tmp_path, monkeypatch):
    def attempt():
        with suppress(KeyboardInterrupt), staged(["memory://bucket/in.txt"], tmp_path / "out") as place:
            copies.append(Path(place.sources[0]).read_text())
            raise KeyboardInterrupt

    copies, fetched, own = [], [], object_stores.shutil.copyfileobj
    monkeypatch.setattr(object_stores.shutil, "copyfileobj", lambda *given: fetched.append(1) or own(*given))
    attempt()
    attempt()
    assert len(fetched) == 1
    bucket.pipe_file("/bucket/in.txt", b"changed, and longer than before\n")
    attempt()
    assert len(fetched) == 2
    assert copies == ["one text\nanother text\n"] * 2 + ["changed, and longer than before\n"]


def test_nothing_is_replaced_unasked(bucket, tmp_path):
    exists = pytest.raises(OutputExistsError, match=r"memory://bucket/in.txt exists already")
    with exists, staged([], "memory://bucket/in.txt", work=tmp_path):
        pass
    with staged([], "memory://bucket/in.txt", work=tmp_path, force=True) as place:
        place.output.write_bytes(b"new")
        place.send([place.output])
    assert bucket.cat_file("/bucket/in.txt") == b"new"


def test_an_output_that_did_not_reach_its_place_is_kept(bucket, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(type(bucket), "put_file", refuse)
    denied = pytest.raises(ResourceError, match=r"memory://bucket/out.txt: Permission denied")
    with denied, staged([], "memory://bucket/out.txt", work=tmp_path) as place:
        place.output.write_bytes(b"whole")
        place.send([place.output])
    assert place.output.read_bytes() == b"whole"
    unsent = pytest.raises(OutputExistsError, match=r"did not reach memory://bucket/out.txt; copy it there")
    with unsent, staged([], "memory://bucket/out.txt", work=tmp_path):
        pass


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        ("memory://bucket/none.txt", DataError, "memory://bucket/none.txt: no such file or folder"),
        ("nowhere://bucket/in.txt", ConfigError, "Protocol not known: nowhere"),
    ],
)
def test_what_cannot_be_read(bucket, tmp_path, source, error, message):
    with pytest.raises(error, match=message), staged([source], tmp_path / "out"):
        pass
    assert names(tmp_path) == []


@pytest.mark.parametrize("name", ["a\0b", "x" * 300])
def test_names_that_no_disk_takes(bucket, tmp_path, name):
    for sources, output in (([], f"memory://bucket/{name}"), ([f"memory://bucket/folder/{name}"], tmp_path / "out")):
        with pytest.raises(GerundError), staged(sources, output, work=tmp_path):
            pass
    assert names(tmp_path) == []


def test_a_store_whose_package_is_missing(tmp_path, monkeypatch):
    def url_to_fs(_url):
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", url_to_fs)
    with pytest.raises(MissingDependencyError, match="pip install s3fs"), staged(["s3://b/x"], tmp_path / "out"):
        pass


def test_embed_from_a_store_to_a_store(bucket, tiny_folder, tmp_path):
    out = ["-m", tiny_folder, "--dtype", "float32", "--threads", 1]
    ran = run_cli("embed", "memory://bucket/in.txt", "-o", "memory://bucket/out.npy", "--work", tmp_path, *out)
    assert ran.code == 0, ran.err
    assert ran.err.endswith(": memory://bucket/out.npy\n")
    (tmp_path / "in.txt").write_bytes(b"one text\nanother text\n")
    assert run_cli("embed", tmp_path / "in.txt", "-o", tmp_path / "out.npy", *out).code == 0
    for name in ("out.npy", "out.ids.jsonl", "out.meta.json"):
        assert bucket.cat_file(f"/bucket/{name}") == (tmp_path / name).read_bytes()
        (tmp_path / name).unlink()
    assert names(tmp_path) == ["in.txt"]


def test_mine_from_a_store_to_a_store(bucket, tmp_path):
    text = "The old river bridge is known. The old river bridge was built long ago. Nothing else."
    bucket.pipe_file("/bucket/corpus.jsonl", b'{"title": "The old river bridge", "text": "%s"}\n{"t\n' % text.encode())
    ran = run_cli("mine", "memory://bucket/corpus.jsonl", "-o", "memory://bucket/pairs.jsonl", "--work", tmp_path)
    assert ran.code == 0, ran.err
    assert b"built long ago" in bucket.cat_file("/bucket/pairs.jsonl")
    assert bucket.exists("/bucket/pairs.errors.jsonl")
    assert "pairs of 1 documents in memory://bucket/pairs.jsonl" in ran.out
    assert names(tmp_path) == []


def test_what_is_gone_from_a_store_is_not_read(bucket, tmp_path):
    found = []

    def attempt():
        with suppress(KeyboardInterrupt), staged(["memory://bucket/folder"], tmp_path / "out") as place:
            found.append({path.name for path in Path(place.sources[0]).rglob("*.txt")})
            raise KeyboardInterrupt

    attempt()
    bucket.rm_file("/bucket/folder/two.txt")
    attempt()
    assert found == [{"one.txt", "two.txt"}, {"one.txt"}]


@pytest.mark.parametrize("more", [[], ["--force"]])
def test_an_output_elsewhere_is_not_what_is_read(tiny_folder, tmp_path, more):
    source, own = tmp_path / "in.parquet", tmp_path / "folder"
    pq.write_table(pa.table({"id": [1], "text": ["one text"]}), source)
    before, out = source.read_bytes(), ["-m", tiny_folder, "--threads", 1, "--work", tmp_path / "work"]
    ran = run_cli("embed", source, "-o", source, *out, *more)
    assert (ran.code, source.read_bytes()) == (2, before)
    assert "is the input itself; choose another output" in ran.err
    own.mkdir()
    (own / "a.txt").write_text("a text")
    ran = run_cli("embed", own, "-o", own / "out.parquet", *out, *more)
    assert ran.code == 2
    assert "would lie in the folder that is read" in ran.err
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"text": "a text"}\n')
    assert run_cli("mine", corpus, "-o", corpus, "--work", tmp_path / "work", *more).code == 2
    assert corpus.read_text() == '{"text": "a text"}\n'


def test_all_files_of_an_output_are_looked_after(tiny_folder, tmp_path):
    out = ["-m", tiny_folder, "--threads", 1, "--work", tmp_path / "work"]
    (tmp_path / "in.txt").write_text("one text\n")
    (tmp_path / "out.ids.jsonl").write_text("mine")
    ran = run_cli("embed", tmp_path / "in.txt", "-o", tmp_path / "out.npy", *out)
    assert ran.code == 2
    assert "out.ids.jsonl exists already" in ran.err
    assert (tmp_path / "out.ids.jsonl").read_text() == "mine"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one text"}\n{"te\n')
    assert run_cli("embed", rows, "-o", tmp_path / "o.parquet", "--bad-rows", "skip", *out).code == 0
    assert (tmp_path / "o.errors.jsonl").is_file()
    rows.write_text('{"text": "one text"}\n{"text": "another"}\n')
    assert run_cli("embed", rows, "-o", tmp_path / "o.parquet", "--bad-rows", "skip", "--force", *out).code == 0
    assert not (tmp_path / "o.errors.jsonl").exists()
