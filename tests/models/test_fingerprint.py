"""Two encoders share a fingerprint exactly when they give the same vectors; hashes of unchanged files are kept."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import gerund
from gerund import AttentionPlan, EncoderConfig, language_model
from gerund.models import fingerprint as module
from gerund.models import hash_cache
from gerund.models.fingerprint import adapter_hash, fingerprint, weights_hash
from tests.cli.helpers import run_python
from tests.tiny import save_tiny, tiny

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
    ran = run_python("-c", FORKS, check=False)
    assert ran.stdout == "0\n0\n", ran.stderr[-2000:]


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches of their own, for small files too."""
    monkeypatch.setattr(module, "LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches"


def counting(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[object]:
    """Return the results of a function, call by call."""
    real, results = getattr(module, name), []

    def counted(*arguments: object) -> object:
        results.append(real(*arguments))
        return results[-1]

    monkeypatch.setattr(module, name, counted)
    return results


@pytest.fixture
def hashed(caches: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return counting(monkeypatch, hash_cache, "weights_hash")


@pytest.fixture
def probed(caches: Path, monkeypatch: pytest.MonkeyPatch) -> list[None]:
    return counting(monkeypatch, language_model, "verify_once")


@pytest.mark.slow
def test_weights_are_hashed_once(tmp_path: Path, hashed: list[str]) -> None:
    base = save_tiny(tmp_path / "base")
    hashes = {gerund.load(base, attention=plan).weights_hash for plan in ("causal", "bidir")}
    assert hashes == set(hashed)
    assert len(hashed) == 1
    # Held in another type, values are others.
    assert gerund.load(base, dtype="bfloat16").weights_hash not in hashes
    assert len(hashed) == 2
    [one, _] = sorted((tmp_path / "caches" / "gerund" / "weights").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    one.write_text("no hash")
    assert gerund.load(base).weights_hash in hashes
    assert len(hashed) == 3


def test_tensors_that_changed_are_not_those_of_the_files(tmp_path: Path, hashed: list[str]) -> None:
    base = save_tiny(tmp_path / "base")
    lm = gerund.load(base)
    before = lm.weights_hash
    with torch.no_grad():
        lm.model.lm_head.weight[0, 0] += 1
    assert lm.weights_hash != before
    assert gerund.load(base).weights_hash == before
    changed = gerund.load(base)
    with torch.no_grad():
        changed.model.lm_head.weight[0, 0] += 1
    assert changed.weights_hash == lm.weights_hash


def test_files_that_changed_are_others(tmp_path: Path, hashed: list[str]) -> None:
    """Also one of the same size, and with its old date."""
    base = save_tiny(tmp_path / "base")
    before, file = gerund.load(base).weights_hash, base / "model.safetensors"
    said = file.stat()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(said.st_atime_ns, said.st_mtime_ns))
    assert (file.stat().st_size, file.stat().st_mtime_ns) == (said.st_size, said.st_mtime_ns)
    assert gerund.load(base).weights_hash != before


@pytest.mark.parametrize("values", [{"num_hidden_layers": 2}, {"is_causal": False}])
def test_a_config_that_takes_other_tensors_of_the_same_files(
    tmp_path: Path, hashed: list[str], values: dict[str, object]
) -> None:
    """Fewer layers, or no head: the files are the same, and the model is another."""
    base = save_tiny(tmp_path / "base", "qwen3")
    before, config = gerund.load(base).weights_hash, json.loads((base / "config.json").read_text())
    if "num_hidden_layers" in values:
        values = {**values, "layer_types": config["layer_types"][:2]}
    (base / "config.json").write_text(json.dumps({**config, **values}))
    assert gerund.load(base, attention="causal").weights_hash == hashed[-1] != before


def test_a_cache_that_cannot_be_written(tmp_path: Path, hashed: list[str], probed: list[None]) -> None:
    (tmp_path / "caches").write_text("a file")
    base = save_tiny(tmp_path / "base")
    assert gerund.load(base, attention="bidir").weights_hash == gerund.load(base, attention="bidir").weights_hash
    assert len(hashed) == len(probed) == 2
    assert not module.probe_passed("0" * 32)


def test_small_files_are_hashed_each_time(tmp_path: Path, caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_BYTES", 1 << 22)
    assert gerund.load(save_tiny(tmp_path / "base")).weights_hash
    assert not caches.exists()


def test_it_is_probed_once(tmp_path: Path, probed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    base = save_tiny(tmp_path / "base")
    vectors = [gerund.load(base, attention="bidir").encode(["a cat"]) for _ in range(2)]
    assert (vectors[0] == vectors[1]).all()
    assert len(probed) == 1
    gerund.load(base, attention="causal")
    gerund.load(base, attention="bidir", dtype="bfloat16")
    assert len(probed) == 3
    # A damaged entry is ignored.
    for entry in (tmp_path / "caches" / "gerund" / "probes").iterdir():
        entry.write_bytes(b"\xff")
    gerund.load(base, attention="bidir")
    assert len(probed) == 4
    gerund.load(base, attention="bidir")
    assert len(probed) == 4
    monkeypatch.setattr(module, "__version__", "another")
    gerund.load(base, attention="bidir")
    assert len(probed) == 5


def test_changed_weights_and_configs_are_probed(tmp_path: Path, probed: list[str]) -> None:
    base = save_tiny(tmp_path / "base")
    lm = gerund.load(base, attention="bidir")
    with torch.no_grad():
        lm.model.lm_head.weight[0, 0] += 1
    lm.with_encoder(lm.encoder)
    assert len(probed) == 2
    config = base / "config.json"
    config.write_text(config.read_text().replace("{", '{"added": 1,', 1))
    gerund.load(base, attention="bidir")
    assert len(probed) == 3
