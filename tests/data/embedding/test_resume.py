"""Embedding goes on after any interruption, full disks and kills included, and mixes nothing."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gerund.data.embedding.files import read_embeddings
from gerund.data.embedding.job import Encoded, _locked
from gerund.data.tables import open_table
from gerund.errors import DataError, FingerprintError, InputError, OutputExistsError, ResourceError
from gerund.jobs.checkpoints import RowStore, WorkingFolder
from tests.data.embedding.crashes import ABOUT, fake_encode
from tests.data.embedding.jobs import TEXTS, Encoder, embed, interrupted, working


class TestGoingOn:
    def test_only_what_is_missing_is_encoded_and_the_bytes_are_the_same(self, source, output):
        embed(source, output)
        whole = {path.name: path.read_bytes() for path in output.parent.iterdir()}
        for path in output.parent.iterdir():
            path.unlink()
        interrupted(source, output)
        encoder = Encoder()
        summary = embed(source, output, encoder)
        assert encoder.shards == [TEXTS[6:9], TEXTS[9:]]
        assert (summary.rows, summary.resumed_rows, summary.truncated) == (10, 6, 4)
        assert {path.name: path.read_bytes() for path in output.parent.iterdir()} == whole

    def test_an_output_there_does_not_stop_a_forced_run_from_going_on(self, source, output):
        embed(source, output)
        interrupted(source, output, force=True)
        with pytest.raises(OutputExistsError):
            embed(source, output)
        encoder = Encoder()
        embed(source, output, encoder, force=True)
        assert len(encoder.shards) == 2

    def test_a_broken_part_is_made_again(self, source, output):
        interrupted(source, output)
        parts = sorted(working(output).glob("part-*"))
        parts[1].write_bytes(parts[1].read_bytes()[:-9])
        encoder = Encoder()
        embed(source, output, encoder)
        assert encoder.shards[0] == TEXTS[3:6]
        np.testing.assert_array_equal(read_embeddings(output).vectors, fake_encode(TEXTS).vectors)

    def test_the_input_may_move_but_not_change(self, source, output, tmp_path):
        interrupted(source, output)
        moved = source.rename(tmp_path / "moved.txt")
        lines = moved.read_text()
        moved.write_text(lines.replace("text 9", "text x"))
        with pytest.raises(InputError, match=r"the rows of .*in.txt have changed; .*--force to start from scratch"):
            embed(moved, output)
        moved.write_text(lines)
        assert embed(moved, output).resumed_rows == 6

    # Longer than what is read ahead.
    LONG = tuple(f"{'x' * 20_000} {text}" for text in TEXTS)

    def test_an_input_that_changes_on_the_way_is_not_mixed(self, source, output):
        source.write_text("".join(f"{text}\n" for text in self.LONG))

        class Editor(Encoder):
            def __call__(self, texts, kept=None):
                if not self.shards:
                    with source.open("r+b") as file:  # in place: nobody sees a file that is cut short
                        file.seek(-2, 2)
                        file.write(b"y")
                return super().__call__(texts, kept)

        encoder = Editor()
        with pytest.raises(DataError, match=r"in.txt has changed since this command began to read it.*--force"):
            embed(source, output, encoder)
        assert [len(shard) for shard in encoder.shards] == [3, 3, 3]
        assert not output.exists()
        with pytest.raises(InputError, match="have changed; go on as before, or give --force"):
            embed(source, output)
        source.write_text(source.read_text().replace("text y", "text 9"))
        assert embed(source, output).resumed_rows == 9
        np.testing.assert_array_equal(read_embeddings(output).vectors, fake_encode(self.LONG).vectors)

    def test_work_of_another_version_is_refused(self, source, output):
        interrupted(source, output)
        (working(output) / "manifest.json").write_text('{"settings": {}, "input": {"digest": "x"}, "name": "in.txt"}')
        with pytest.raises(InputError, match="unfinished work of another version of gerund; give --force"):
            embed(source, output)
        assert embed(source, output, force=True).resumed_rows == 0

    @pytest.mark.parametrize(
        "change, error, message",
        [
            (dict(about={**ABOUT, "fingerprint": "g", "model": "n"}), FingerprintError, "the model was m and is n"),
            (
                dict(about={**ABOUT, "fingerprint": "g", "attention": {"name": "bidir"}}),
                FingerprintError,
                "attention.name was None and is 'bidir'",
            ),
            (dict(about={**ABOUT, "prompt": "Q: "}), InputError, "prompt was None and is 'Q: '"),
            (dict(computing={"dtype": "bfloat16"}), InputError, "dtype was None and is 'bfloat16'"),
            (dict(shard_rows=4), InputError, "shard_rows was 3 and is 4"),
            (dict(keep_text=True), InputError, "keep_text was False and is True"),
        ],
    )
    def test_other_settings_are_refused(self, source, output, change, error, message):
        interrupted(source, output)
        with pytest.raises(error) as caught:
            embed(source, output, **change)
        assert type(caught.value) is error
        assert message in str(caught.value)
        assert len(list(working(output).glob("part-*"))) == 2
        assert embed(source, output, force=True, **change).resumed_rows == 0

    def test_a_model_that_has_only_moved_goes_on(self, source, output):
        interrupted(source, output)
        assert embed(source, output, about={**ABOUT, "model": "elsewhere/m"}).resumed_rows == 6

    def test_a_job_that_was_only_not_tidied_up_encodes_nothing(self, source, output, monkeypatch):
        def killed(folder):
            for path in list(folder.parts().values())[1:]:
                path.unlink()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(WorkingFolder, "remove", killed)
            with pytest.raises(KeyboardInterrupt):
                embed(source, output)
        assert output.exists()
        encoder = Encoder()
        summary = embed(source, output, encoder)
        assert encoder.shards == []
        assert (summary.rows, summary.resumed_rows, summary.truncated) == (10, 10, 4)
        assert not working(output).exists()

    def test_without_a_finished_part_nothing_stays(self, source, output):
        with pytest.raises(KeyboardInterrupt):
            embed(source, output, Encoder(fail_at=0))
        assert not working(output).exists()

    @pytest.mark.slow
    @pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
    @pytest.mark.parametrize("kind", ["parquet", "npy"])
    def test_killed_before_every_step_on_the_disk(self, tmp_path, kind):
        root = Path(__file__).resolve().parents[3]
        ran = subprocess.run(
            [sys.executable, "-m", "tests.data.embedding.crashes", kind, str(tmp_path)],
            check=False,
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root / "src")},
            capture_output=True,
            text=True,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert int(ran.stdout) > 20


class TestStandardInput:
    def test_is_kept_until_the_end_and_compared_afterwards(self, source, output, monkeypatch):
        def piped(content, encode=fake_encode, **options):
            with content.open() as stream:
                monkeypatch.setattr(sys, "stdin", stream)
                return embed(None, output, encode, table=open_table("-"), **options)

        with pytest.raises(KeyboardInterrupt):
            piped(source, Encoder(fail_at=2))
        changed = source.with_name("changed.txt")
        changed.write_text("other\n")
        with pytest.raises(InputError, match="the rows of standard input have changed"):
            piped(changed)
        assert piped(source).resumed_rows == 6
        assert not working(output).exists()
        assert piped(changed, force=True).rows == 1

    def test_pipes_by_name(self, output, tmp_path):
        pipe = tmp_path / "pipe.jsonl"
        os.mkfifo(pipe)
        writer = subprocess.Popen(["sh", "-c", f'echo \'{{"text": "one"}}\' > {pipe}'])
        assert embed(pipe, output).rows == 1
        assert writer.wait() == 0


class TestFullDisk:
    @pytest.mark.parametrize("at", [5, 8, 11, 12, 14])
    def test_keeps_what_is_finished_and_goes_on(self, source, output, monkeypatch, at):
        calls = 0

        def full(handle):
            nonlocal calls
            calls += 1
            if calls >= at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", full)
            with pytest.raises(ResourceError, match=r"No space left on device; \d+ of 10 rows are kept in .*\.parts"):
                embed(source, output)
        assert not list(output.parent.rglob(".*")), "no half-written file may take up space"
        summary = embed(source, output)
        # Files and folders are flushed in turn: 1-3 for the manifest, 4 and 5 for the first part, ...
        assert summary.resumed_rows == min(10, 3 * ((at - 3) // 2))
        np.testing.assert_array_equal(read_embeddings(output).vectors, fake_encode(TEXTS).vectors)

    def test_rows_that_wait_for_the_disk_are_not_said_to_be_kept(self, source, output, monkeypatch):
        def full(*_arguments):
            raise ResourceError("cannot store vectors: No space left on device")

        is_full = True

        def encode(texts, kept):
            vectors = fake_encode(texts).vectors
            encoding_pass = kept.encoding_pass()
            done = encoding_pass.restore(vectors)
            for row in range(len(texts)):
                if row not in done:
                    encoding_pass.save([row], vectors[[row]])
                    if is_full and row == 0:
                        kept.flush()  # the first row is on the disk, the others wait for it
                        monkeypatch.setattr(RowStore, "add", full)
            return Encoded(vectors)

        with pytest.raises(ResourceError, match=r"No space left on device; 1 of 10 rows are kept in "):
            embed(source, output, encode)
        monkeypatch.undo()
        is_full = False
        assert embed(source, output, encode).resumed_rows == 1

    def test_at_the_very_first_write(self, source, output, monkeypatch):
        def full(handle):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(ResourceError, match=r"No space left on device$"):
            embed(source, output)
        assert not working(output).exists()

    def test_out_of_memory_says_how_to_go_on(self, source, output):
        with pytest.raises(ResourceError, match=r"out of memory; 6 of 10 rows are kept in .* run the same command"):
            embed(source, output, Encoder(fail_at=2, error=ResourceError("out of memory")))


def test_rows_are_kept_by_one_worker_at_a_time(tmp_path):
    """Another one may live on at a shard that was begun again."""
    folder = tmp_path / "unfinished-000000"
    with _locked(folder) as own, _locked(folder) as another:
        assert (own, another) == (folder, None)
    with _locked(folder) as own:
        assert own == folder


def test_rows_that_were_too_long_come_in_where_they_may_be_cut(tmp_path):
    source, output = tmp_path / "in.txt", tmp_path / "out.parquet"
    source.write_text("".join(f"{text}\n" for text in TEXTS))

    class Refusing(Encoder):
        def __call__(self, texts, kept=None):
            vectors = super().__call__(texts, kept)
            return Encoded(getattr(vectors, "vectors", vectors), refused={1: "the text is too long"})

    with pytest.raises(KeyboardInterrupt):
        embed(source, output, Refusing(fail_at=2), bad_rows="skip", overflow="error")
    found = embed(source, output, bad_rows="skip", overflow="truncate")
    assert (found.rows, found.bad, found.resumed_rows) == (len(TEXTS), 0, 0)
