"""A training that was cut short ends with the very same weights; two at once in one folder are refused."""

import os
import shutil
import signal

import pytest

from gerund.errors import ConfigError, InputError, OutputExistsError, ResourceError
from gerund.jobs.files import LOCK, lock_folder
from gerund.training.run_folder import newest_checkpoint
from tests.training.outcomes import CrashError, assert_equal_states, crash_at, losses, read_log


class TestResume:
    @pytest.mark.slow
    def test_crash_and_resume_end_bit_equal(self, run, whole, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            crash_at(patch, 7)
            with pytest.raises(CrashError):
                run("broken")
        with pytest.raises(OutputExistsError, match="go on with --resume"):
            run("broken")
        run("broken", resume=True)
        assert_equal_states(whole, tmp_path / "broken")
        assert losses(whole) == losses(tmp_path / "broken")

    @pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
    @pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.full), signal.SIGTERM])
    def test_an_interruption_keeps_the_step_it_came_in(self, run, whole, tmp_path, monkeypatch, capfd, number):
        before = signal.signal(number, signal.default_int_handler)
        try:
            with monkeypatch.context() as patch:
                crash_at(patch, 6, lambda: signal.raise_signal(number))
                with pytest.raises(KeyboardInterrupt) as caught:
                    run("cut")
            assert signal.getsignal(number) == signal.default_int_handler
        finally:
            signal.signal(number, before)
        assert caught.value.__notes__ == [f"step 7 is kept in {tmp_path / 'cut'}: give --resume to go on from there"]
        assert "gerund: ending after this step, with a checkpoint; once more ends at once\n" in capfd.readouterr().err
        run("cut", resume=True)
        assert "resuming at step 7 of 12" in capfd.readouterr().err
        assert_equal_states(whole, tmp_path / "cut")
        assert read_log(whole)[-1]["tokens"] == read_log(tmp_path / "cut")[-1]["tokens"]

    @pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
    def test_a_second_interruption_ends_at_once(self, run, tmp_path, monkeypatch):
        def twice():
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            crash_at(monkeypatch, 6, twice)
            with pytest.raises(KeyboardInterrupt) as caught:
                run("cut")
        finally:
            signal.signal(signal.SIGINT, before)
        assert caught.value.__notes__ == [f"step 4 is kept in {tmp_path / 'cut'}: give --resume to go on from there"]

    @pytest.mark.slow
    def test_resume_where_there_is_nothing_starts(self, run):
        assert run("new", "steps=6", "save_steps=6", resume=True).is_dir()

    @pytest.mark.slow
    def test_half_written_checkpoints_are_removed_by_name(self, run, whole, tmp_path, monkeypatch, capsys):
        with monkeypatch.context() as patch:
            crash_at(patch, 9)
            with pytest.raises(CrashError):
                run("broken")
        checkpoints = tmp_path / "broken" / "checkpoints"
        (checkpoints / "checkpoint-8" / "optimizer.pt").unlink()
        (checkpoints / "checkpoint-400").mkdir()
        run("broken", resume=True)
        told = capsys.readouterr().err
        assert "removing checkpoint-8: optimizer.pt is missing" in told
        assert "removing checkpoint-400: cut short before it was complete" in told
        assert "resuming at step 4" in told
        assert not (checkpoints / "checkpoint-400").exists()
        assert_equal_states(whole, tmp_path / "broken")

    @pytest.mark.slow
    def test_manifest_finds_every_kind_of_damage(self, whole, tmp_path):
        shutil.copytree(whole, tmp_path / "out")
        checkpoints = tmp_path / "out" / "checkpoints"
        last = checkpoints / "checkpoint-12"
        assert newest_checkpoint(checkpoints) == (last, {})
        whole = (last / "scheduler.pt").read_bytes()
        (last / "scheduler.pt").write_bytes(whole[:-1])
        problem = f"scheduler.pt has {len(whole) - 1} bytes instead of {len(whole)}"
        assert newest_checkpoint(checkpoints) == (checkpoints / "checkpoint-8", {last: problem})
        for content in ("{", "[]", "{}", "null", "\0\0"):
            (last / "manifest.json").write_text(content, "utf-8")
            assert newest_checkpoint(checkpoints)[1] == {last: "its manifest is unreadable"}
        assert newest_checkpoint(tmp_path / "absent") == (None, {})

    @pytest.mark.slow
    def test_shorter_end_of_a_stable_phase_equals_planning_it(self, run, tmp_path, monkeypatch):
        run("planned", "steps=10")
        with monkeypatch.context() as patch:
            crash_at(patch, 5)
            with pytest.raises(CrashError):
                run("cut", "steps=40")
        run("cut", "steps=10", resume=True)
        assert_equal_states(tmp_path / "planned", tmp_path / "cut")

    @pytest.mark.slow
    def test_changed_settings_and_data_are_refused(self, run, corpus, tmp_path, monkeypatch):
        with monkeypatch.context() as patch:
            crash_at(patch, 9)
            with pytest.raises(CrashError):
                run("out")
        with pytest.raises(
            ConfigError,
            match=r"sources\.a\.weight was 2\.0 and is 3\.0; .*learning_rate was 0\.01 and is 0\.1; seed was 0",
        ):
            run("out", "seed=1", "optimizer.learning_rate=0.1", "data.sources.a.weight=3", resume=True)
        with pytest.raises(ConfigError, match="while the learning rate is stable, until step 6"):
            run("out", "steps=10", resume=True)
        (tmp_path / "other").mkdir()
        for path in corpus.iterdir():
            (tmp_path / "other" / path.name).write_bytes(path.read_bytes().replace(b"cat", b"catfish"))
        with pytest.raises(ConfigError, match=r"the files in data\.folder have changed"):
            run("out", f"data.folder={tmp_path / 'other'}", resume=True)
        (tmp_path / "out" / "recipe.json").unlink()
        with pytest.raises(ConfigError, match="is missing"):
            run("out", resume=True)


class TestLock:
    @pytest.mark.slow
    def test_another_training_in_the_same_folder_is_refused(self, run, tmp_path):
        with (
            lock_folder(tmp_path / "out"),
            pytest.raises(InputError, match=rf"^process {os.getpid()} is writing .*out already; wait"),
        ):
            run("out")
        assert not (tmp_path / "out").exists()
        run("out", "steps=6", "save_steps=6")
        assert not (tmp_path / "out" / LOCK).exists()

    def test_a_folder_that_cannot_be_locked(self, run, tmp_path, monkeypatch):
        def refuse(self):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("filelock.FileLock.acquire", refuse)
        with pytest.raises(ResourceError, match=r"cannot write .*out: Permission denied"):
            run("out")
