"""Two encoders share a fingerprint exactly when they give the same vectors."""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import gerund
from gerund import AttentionPlan, EncoderConfig
from gerund.models.fingerprint import adapter_hash, fingerprint, weights_hash
from tests.tiny import tiny

PLAN = AttentionPlan("mask0+bidir", k=3, k0=1)
CONFIG = EncoderConfig(PLAN, prompts={"query": "Q: "})


def identity(config: EncoderConfig = CONFIG, weights: str = "w", adapter: str = "", n_layers: int = 4, **kw) -> str:
    return fingerprint(weights, adapter, config, n_layers, **kw)


def test_sixteen_hexadecimal_digits_that_stay_the_same() -> None:
    assert re.fullmatch("[0-9a-f]{16}", identity())
    assert identity() == identity(replace(CONFIG))


@pytest.mark.parametrize(
    "change",
    [
        {"attention": AttentionPlan("mask0+bidir", k=4, k0=1)},
        {"attention": AttentionPlan("mask0+bidir", k=3, k0=2)},
        {"attention": AttentionPlan("mask0+bidir", k=3, k0=1, sink_tokens=2)},
        {"attention": AttentionPlan("mask0+bidir", k=3, k0=1, skips=3)},
        {"attention": AttentionPlan("mask0+bidir", k=3, k0=1, skips=2)},
        {"attention": AttentionPlan("bidir")},
        {"pooling": "last"},
        {"prompt": "x"},
        {"prompts": {}},
        {"pool_prompt": True},
        {"append_eos": True},
        {"max_length": 8},
    ],
)
def test_settings_that_count(change: dict) -> None:
    assert identity(replace(CONFIG, **change)) != identity()


def test_settings_that_do_not() -> None:
    assert identity(replace(CONFIG, normalize=False)) == identity()  # each call may say otherwise
    left_out, filled_in = EncoderConfig(AttentionPlan()), EncoderConfig(AttentionPlan(k=2))
    assert identity(left_out) == identity(filled_in)


def test_weights_adapter_and_dimensions_count() -> None:
    others = [identity(weights="v"), identity(adapter="a"), identity(dimensions=8), identity(dimensions=16)]
    assert len({identity(), *others}) == 5


def test_every_weight_counts() -> None:
    model = tiny("llama")
    before = weights_hash(model.state_dict())
    for parameter in model.parameters():
        kept = parameter.data.clone()
        parameter.data.view(-1)[-1] += 1e-3
        assert weights_hash(model.state_dict()) != before
        parameter.data.copy_(kept)
    assert weights_hash(model.state_dict()) == before


def test_names_and_shapes_count() -> None:
    a = torch.arange(6.0)
    hashes = {weights_hash(state) for state in ({"a": a}, {"b": a}, {"a": a.view(2, 3)}, {"a": a.view(3, 2)}, {})}
    assert len(hashes) == 5
    turned = torch.arange(6.0).view(2, 3).T
    assert weights_hash({"a": turned}) == weights_hash({"a": turned.contiguous()})
    empty, scalar, whole = torch.zeros(0), torch.tensor(1.0), torch.arange(3)
    assert len({weights_hash({"a": tensor}) for tensor in (empty, scalar, whole, whole.bool())}) == 4


def test_rounded_weights_are_other_weights(tiny_folder: Path) -> None:
    prints = {gerund.load(tiny_folder, dtype=name).fingerprint() for name in ("float32", "bfloat16", "float16")}
    assert len(prints) == 3


@pytest.mark.slow
def test_of_a_language_model(tiny_folder: Path, tmp_path: Path) -> None:
    lm = gerund.load(tiny_folder, k=2, dtype="float32")
    assert lm.fingerprint() == gerund.load(tiny_folder, k=2, dtype="float32").fingerprint()
    assert lm.fingerprint(lm.dimensions) == lm.fingerprint() != lm.fingerprint(8)
    moved = shutil.copytree(tiny_folder, tmp_path / "moved")
    assert gerund.load(moved, k=2, dtype="float32").fingerprint() == lm.fingerprint()
    untied = AutoModelForCausalLM.from_pretrained(tiny_folder)
    untied.model.norm.weight.data[0] += 1e-3
    assert gerund.LanguageModel(untied, lm.tokenizer, lm.encoder).fingerprint() != lm.fingerprint()


def test_of_an_adapter(tmp_path: Path) -> None:
    assert adapter_hash(None) == ""
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_bytes(b"a")
    before = adapter_hash(tmp_path)
    (tmp_path / "README.md").write_text("does not count")
    assert adapter_hash(tmp_path) == before
    (tmp_path / "adapter_model.safetensors").write_bytes(b"b")
    assert adapter_hash(tmp_path) != before


FORKS = """
import os, sys, torch
from concurrent.futures import ThreadPoolExecutor
from gerund.models.fingerprint import weights_hash
from gerund.models.library_calls import guarded

def cast(state):  # what transformers does with weights of another type
    with ThreadPoolExecutor(max_workers=4) as pool:
        return sum(pool.map(lambda weight: float(weight.float().sum()), state.values()))

torch.set_num_threads(1)
state = {f"w{number}": torch.ones(300, 300).bfloat16() * number for number in range(40)}
for work in (weights_hash, lambda state: guarded("cannot load", cast, state)):
    wanted, failed = work(state), 0
    for _ in range(30):
        child = os.fork()
        if not child:
            try:
                os._exit(work(state) != wanted)
            except BaseException:
                os._exit(2)
        failed += os.waitpid(child, 0)[1] != 0
    print(failed)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_the_same_in_forked_processes() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", FORKS], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.stdout == "0\n0\n", ran.stderr[-2000:]
