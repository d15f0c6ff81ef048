"""What an index in a folder, or on an object store, has beside what every store has."""

import copy
import os
import pickle
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import lancedb
import numpy as np
import pytest

from gerund.errors import DataError, InputError, MissingDependencyError, ResourceError
from gerund.retrieval import lance_store
from gerund.retrieval.documents import Chunking, Document
from gerund.retrieval.lance_store import LanceStore, _table_name
from gerund.retrieval.store import IndexMetadata, KeywordQuery
from tests.retrieval.helpers import ABOUT, DIMENSIONS, chunk, cut_lines, embed, sources, stored

ROOT = Path(__file__).resolve().parents[2]


def test_it_is_opened_again_and_readers_see_what_another_wrote(tmp_path):
    writer, reader = LanceStore(tmp_path / "my.index"), LanceStore(tmp_path / "my.index")
    assert reader.about() is None
    writer.create(ABOUT)
    assert reader.about() == ABOUT
    for place in range(3):
        stored(writer, [chunk(f"d{place}", f"text {place}")])
        assert reader.count() == place + 1
        assert len(reader.words(KeywordQuery("text"), 9)) == place + 1
    writer.tidy()
    assert len(reader.vectors(np.ones(DIMENSIONS, dtype=np.float32), 9)) == 3
    writer.swap(writer.create_successor(IndexMetadata("other", "m", DIMENSIONS, "x", Chunking(9))))
    with pytest.raises(InputError, match="was migrated by another process meanwhile; open it again"):
        reader.words(KeywordQuery("text"), 9)
    with pytest.raises(InputError, match="was migrated by another process meanwhile; open it again"):
        reader.words(KeywordQuery.of('"of text"'), 9)


def test_a_creation_that_was_killed_is_finished(tmp_path, caplog):
    LanceStore(tmp_path / "my.index")._create_tables(_table_name(ABOUT), ABOUT)
    lancedb.connect(tmp_path / "my.index").open_table(_table_name(ABOUT)).drop_index("terms_idx")
    store = LanceStore(tmp_path / "my.index")
    store.create(ABOUT)
    stored(store, [chunk("a", "Bread rises.")])
    assert sources(LanceStore(tmp_path / "my.index").words(KeywordQuery("bread"), 5)) == ["a"]
    assert caplog.messages == [f"{store.name}: the index of its words was not finished, and is finished now"]


def test_what_is_there_and_is_no_index(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DataError, match="is a file; an index is a folder"):
        LanceStore(tmp_path / "file")
    with pytest.raises(DataError, match="is not an index: it contains file"):
        LanceStore(tmp_path)
    (tmp_path / "empty").mkdir()
    assert LanceStore(tmp_path / "empty").about() is None


def test_a_folder_that_may_not_be_read_or_written_or_made(tmp_path, monkeypatch):
    LanceStore(tmp_path / "my.index").create(ABOUT)

    def refuse(_self):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "iterdir", refuse)
        with pytest.raises(InputError, match=r"my\.index cannot be read or written: permission denied"):
            LanceStore(tmp_path / "my.index")
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"my\.index cannot be read or written: Not a directory"):
        LanceStore(tmp_path / "file" / "my.index").create(ABOUT)
    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    for write in (
        lambda store: stored(store, [chunk("a", "One.")]),
        lambda store: store.note_files({"a": "1"}),
        lambda store: store.create_successor(ABOUT),
    ):
        with pytest.raises(InputError, match=r"my\.index cannot be read or written: Permission denied"):
            write(LanceStore(tmp_path / "my.index"))
    assert LanceStore(tmp_path / "my.index").count() == 0


def fill(folder: str) -> None:
    """Write into an index until the disk is full, print the error, and look whether what was stored is there still."""
    store = LanceStore(Path(folder) / "my.index")
    store.create(ABOUT)
    filled = []
    try:
        for number in range(1000):
            # Without two equal lines, so that nothing gets smaller on the disk.
            text = "\n".join(f"{number * 1000 + line:x} {hash((number, line)):x}" for line in range(1000))
            chunks = cut_lines(Document(f"d{number}", text))
            store.replace([f"d{number}"], chunks, embed([chunks]))
            filled.append(f"d{number}")
    except ResourceError as error:
        print(f"{type(error).__name__}: {error}")
    assert filled, "the disk was full at once"
    again = LanceStore(Path(folder) / "my.index")
    assert sorted(again.documents()) == sorted(filled)
    assert again.count() == 1000 * len(filled)
    assert again.vectors(embed([chunks])[0], 1)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("unshare") is None, reason="needs a disk of its own, which unshare lets mount")
def test_a_full_disk_keeps_what_was_stored(tmp_path):
    small = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]), "sh", "-c"]
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}"
    if subprocess.run([*small, mount], capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    run = f"import sys; from {__name__} import fill; fill(sys.argv[1])"
    done = subprocess.run(
        [*small, f"{mount} && exec {sys.executable} -c '{run}' {tmp_path}"],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [told] = done.stdout.splitlines()
    assert told.startswith(f"ResourceError: {tmp_path}/my.index cannot be written: ")
    assert "No space left on device" in told
    assert told.endswith("what was stored before is kept")


def test_a_newer_format_is_refused(tmp_path):
    with pytest.raises(DataError, match="has format 2"):
        IndexMetadata.from_json(ABOUT.to_json().replace('"format": 1', '"format": 2'), "my.index")
    for broken in ("{", "[]", "{}", '{"format": 1}', ABOUT.to_json().replace("tokens", "token")):
        with pytest.raises(DataError, match=r"my\.index|not a description of chunking"):
            IndexMetadata.from_json(broken, "my.index")


def test_without_lancedb_there_is_the_pip_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "lancedb", None)
    with pytest.raises(MissingDependencyError, match=r"my\.index needs LanceDB: pip install 'gerund\[index\]'"):
        LanceStore(tmp_path / "my.index").create(ABOUT)


def test_lancedbs_own_service_is_refused_by_name():
    with pytest.raises(InputError, match=r"db://mine is LanceDB's own service, .* name a folder, or the path of"):
        LanceStore("db://mine")


def test_what_an_interrupted_writer_left_out_is_made_up_for(tmp_path, monkeypatch):
    monkeypatch.setattr(lance_store, "FLAT_ROWS", 256)
    store = LanceStore(tmp_path / "my.index")
    assert store.is_tidy()
    store.create(ABOUT)
    assert store.is_tidy()
    stored(store, [chunk(f"d{place}", f"text {place}") for place in range(200)])
    assert not store.is_tidy()
    assert store.finish()
    assert store.is_tidy()
    assert not store.finish()
    stored(store, [chunk(f"e{place}", f"text {place}") for place in range(100)])
    with store.locked():  # as another process that is still at it
        assert not LanceStore(tmp_path / "my.index").finish()
    table = store._table(store._require_current())
    table.optimize()
    assert not store.is_tidy()  # there is no index of vectors yet
    assert LanceStore(tmp_path / "my.index").finish()
    assert {tuple(one.columns) for one in table.list_indices()} == {("terms",), ("vector",)}
    assert store.is_tidy()
    assert len(store.words(KeywordQuery("text"), 400)) == 300


def test_a_full_disk_keeps_nobody_from_searching(tmp_path, monkeypatch):
    def full(_self):
        raise ResourceError("my.index cannot be written: No space left on device")

    store = LanceStore(tmp_path / "my.index")
    store.create(ABOUT)
    stored(store, [chunk("a", "one cat")])
    monkeypatch.setattr(LanceStore, "tidy", full)
    assert not store.finish()
    assert sources(store.words(KeywordQuery("cat"), 5)) == ["a"]


@pytest.mark.parametrize("place", ["file://{folder}/my.index", "memory://{name}/my.index"])
def test_paths_of_object_stores_are_lancedbs(tmp_path, place):
    store = LanceStore(place.format(folder=tmp_path, name=tmp_path.name))
    assert store.about() is None
    store.create(ABOUT)
    document = Document("a", "one cat\ntwo dogs")
    chunks = cut_lines(document)
    store.replace(["a"], chunks, embed([chunks]))
    store.tidy()
    assert [chunk.text for chunk, _ in store.words(KeywordQuery("cat"), 5)] == ["one cat"]
    assert [chunk.text for chunk, _ in store.words(KeywordQuery.of('"one cat"'), 5)] == ["one cat"]
    assert store.words(KeywordQuery.of('"the cat"'), 5) == store.words(KeywordQuery.of('"the"'), 5) == []
    assert store.vectors(embed([chunks])[1], 1)[0][0].text == "two dogs"
    store.replace(["a"], [], embed([chunks])[:0])
    assert store.count() == 0


def test_a_search_waits_for_no_other_thread_that_writes(tmp_path):
    store = LanceStore(tmp_path / "my.index")
    store.create(ABOUT)
    stored(store, [chunk("a", "one cat")])
    found = []
    with store.locked():
        thread = threading.Thread(
            target=lambda: found.extend(sources(store.words(KeywordQuery("cat"), 5))), daemon=True
        )
        thread.start()
        thread.join(30)
        assert found == ["a"]


def test_a_copy_opens_the_place_anew(tmp_path):
    store = LanceStore(tmp_path / "my.index")
    for one in (copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert one.about() is None
    store.create(ABOUT)
    stored(store, [chunk("a", "one cat")])
    for one in (copy.copy(store), copy.deepcopy(store), pickle.loads(pickle.dumps(store))):
        assert (one.name, one.count()) == (store.name, 1)
        stored(one, [chunk("a", "one dog")])
        assert [found.text for found in store.chunks_of(["a"])] == ["one dog"]
