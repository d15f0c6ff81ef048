"""Processes that start, or do not: several machines, the command's own launcher, mistakes that only one sees."""

import json
import os

import pytest
import yaml

from gerund.jobs.files import lock_folder
from tests.training.processes.one_of_two import work, work_nodes
from tests.training.processes.recipes import recipes
from tests.training.processes.starting import start_two, started


@pytest.mark.slow
def test_a_folder_that_another_training_writes(paired_corpus, base, tmp_path):
    """The first process alone takes the lock; what it is refused with, the other says too."""
    out = tmp_path / "out"
    content = {**recipes(paired_corpus, base, tmp_path / "cache")["causal"], "output": str(out)}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(content), "utf-8")
    jobs = [{"recipe": str(tmp_path / "recipe.yaml"), "overrides": []}]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    with lock_folder(out):
        start_two(work, tmp_path)
        assert [path.name for path in out.iterdir()] == ["lock"]
    expected = [f"process {os.getpid()} is writing {out} already; wait for it or choose another name"]
    for rank in range(2):
        assert json.loads((tmp_path / f"stopped-{rank}.json").read_text()) == expected


@pytest.mark.slow
def test_two_machines(tmp_path):
    """One process a machine makes what lies on its disk, and a folder that only one of them has is refused."""
    start_two(work_nodes, tmp_path)
    assert (tmp_path / "order.txt").read_text().splitlines() == ["0 begins", "0 ends", "1 begins", "1 ends"]
    refused = f"process 1 does not see what the first one writes into {tmp_path / 'own-'}"
    for rank in range(2):
        shared, own = json.loads((tmp_path / f"nodes-{rank}.json").read_text())
        assert shared is None
        assert own.startswith(f"{refused}{rank}: several nodes need an output folder that all of them share")
    assert list((tmp_path / "shared").iterdir()) == []


@pytest.mark.full
def test_the_command_starts_processes_itself(paired_corpus, base, tmp_path):
    """``--processes``: the first one alone says what was made."""
    content = recipes(paired_corpus, base, tmp_path / "cache")["unimae"]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({**content, "output": str(tmp_path / "out"), "sharding": "fsdp2"}), "utf-8")
    done = started("train", str(path), "--processes", "2", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"] == str(tmp_path / "out" / "model")
    assert done.stderr.count("step 4/4  loss") == 1


@pytest.mark.slow
def test_a_mistake_in_one_process_ends_both_soon(paired_corpus, base, tmp_path):
    """The first process alone reads files; the other must not wait for it in vain."""
    content = recipes(paired_corpus, base, tmp_path / "cache")["unimae"]
    content["objectives"][1]["pairs"] = {"files": ["absent.jsonl"]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**content, "output": str(tmp_path / "out")}), "utf-8")
    done = started("train", str(tmp_path / "recipe.yaml"), "--processes", "2")
    assert done.returncode != 0
    told = [line for line in done.stderr.splitlines() if line.startswith("gerund: error: ")]
    assert f"gerund: error: {paired_corpus / 'absent.jsonl'}: no such file" in told[0]
    # The other is stopped by the launcher, or finds out and says so.
    assert all("another process of this training has ended" in line for line in told[1:])
    # Neither torch's call nor its launcher's report.
    assert "distributed" not in done.stderr
    assert not (tmp_path / "out" / "recipe.json").exists()
