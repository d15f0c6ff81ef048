"""S3 as its own API speaks it: moto's server on loopback, s3fs, and LanceDB's own client.

They are no part of the development environment, whose versions they do not all agree with:
`pip install s3fs 'moto[server]'`.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gerund
from tests.cli.helpers import run_cli

pytest.importorskip("s3fs", reason="s3fs is not installed")
pytest.importorskip("moto.server", reason="moto's server is not installed")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import s3fs

    settings = {
        "AWS_ACCESS_KEY_ID": "nobody",
        "AWS_SECRET_ACCESS_KEY": "nothing",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ALLOW_HTTP": "true",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    store = s3fs.S3FileSystem()
    store.mkdir("bucket")
    store.pipe_file("bucket/in.txt", b"one text\nanother text\n")
    yield store
    store.rm("bucket", recursive=True)
    s3fs.S3FileSystem.clear_instance_cache()


def test_embedding_from_s3_to_s3(bucket: Any, tiny_folder: Path, tmp_path: Path) -> None:
    ran = run_cli("embed", "-m", tiny_folder, "s3://bucket/in.txt", "-o", "s3://bucket/out.npy", "--work", tmp_path)
    assert ran.code == 0, ran.err
    found = np.load(io.BytesIO(bucket.cat_file("bucket/out.npy")))
    np.testing.assert_allclose(found, gerund.load(tiny_folder).encode(["one text", "another text"]), atol=1e-6)


def test_an_index_on_s3(bucket: Any, tiny_folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lancedb")
    (tmp_path / "one.txt").write_text("The train was late because of the snow.")
    (tmp_path / "two.txt").write_text("Interest rates rose again in spring.")
    assert run_cli("index", tmp_path, "-m", tiny_folder, "--chunk-tokens", 40, "-o", "s3://bucket/my.index").code == 0
    assert any("my.index" in name for name in bucket.ls("bucket"))
    found = run_cli("search", "s3://bucket/my.index", "snow on the rails", "-m", tiny_folder, "--mode", "words")
    assert found.code == 0, found.err
    assert "one.txt" in found.out.splitlines()[0]


def test_what_is_not_there_is_one_sentence(bucket: Any, tiny_folder: Path, tmp_path: Path) -> None:
    for url in ("s3://bucket/none.jsonl", "s3://nobody-has-this/none.jsonl"):
        ran = run_cli("embed", "-m", tiny_folder, url, "-o", tmp_path / "out.parquet", "--work", tmp_path)
        assert ran.code == 2
        assert f"{url}: no such file or folder" in ran.err
