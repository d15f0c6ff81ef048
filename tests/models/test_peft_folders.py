"""PEFT folders that are opened by themselves, LLM2Vec's stack of adapters, and GritLM."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

import gerund
from gerund.errors import DataError, ModelError
from gerund.models.adapters import stacked
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.cli.helpers import run_cli
from tests.ready_made import change, ready_made, write
from tests.tiny import byte_tokenizer, load, save_tiny

pytestmark = [pytest.mark.filterwarnings(warning) for warning in PEFT_WARNINGS]

TEXTS = ["the cat sat on the mat", "a", "zürich 数据库, and another thing"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def adapter(base: Path | PreTrainedModel, folder: Path, name: str, *, seed: int = 0, **settings: Any) -> Path:
    """Save a LoRA adapter with random weights, of a model without a head, that names its base."""
    body = AutoModel.from_pretrained(base, dtype=torch.float32) if isinstance(base, Path) else base
    config = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, **settings}
    torch.manual_seed(seed)
    wrapped = get_peft_model(body, LoraConfig(**config))
    for key, parameter in wrapped.named_parameters():
        if "lora_" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    wrapped.save_pretrained(folder)
    change(folder / "adapter_config.json", base_model_name_or_path=name)
    return folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return save_tiny(tmp_path / "base", "mistral", sliding_window=None)


# --------------------------------------------------------------------------------------------- adapters by themselves


@pytest.mark.slow
def test_an_adapter_of_a_language_model_becomes_part_of_its_weights(base: Path, tmp_path: Path) -> None:
    folder = make_adapter(base, tmp_path / "lora", task_type="CAUSAL_LM")
    lm = load(folder)
    assert lm.name == str(folder)
    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), folder)
    merged = merged.merge_and_unload().eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(lm.model(ids).logits, merged(ids).logits)
    assert lm.adapter_hash == ""
    assert lm.weights_hash != load(base).weights_hash
    assert gerund.load(lm.spec).fingerprint() == lm.fingerprint()
    lm.save(tmp_path / "saved")
    assert np.array_equal(load(tmp_path / "saved").encode(TEXTS), lm.encode(TEXTS))
    assert run_cli("convert", folder, tmp_path / "converted").code == 0
    assert np.array_equal(load(tmp_path / "converted").encode(TEXTS), lm.encode(TEXTS))


@pytest.mark.slow
def test_an_adapter_of_sentence_transformers_encodes_and_leaves_the_base_as_it_is(tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    ready = ready_made(tmp_path / "st", with_head=True, max_seq_length=64)
    plain = save_tiny(tmp_path / "base", "qwen3", vocab_size=len(byte_tokenizer()))
    body = AutoModel.from_pretrained(plain, dtype=torch.float32)
    adapter(body, ready, str(plain), task_type="FEATURE_EXTRACTION")
    for name in ("model.safetensors", "config.json"):
        (ready / name).unlink()
    lm = load(ready)
    expected = st.SentenceTransformer(str(ready), device="cpu", model_kwargs={"dtype": torch.float32})
    for name in (None, "query"):
        theirs = expected.encode(TEXTS, prompt_name=name, show_progress_bar=False)
        np.testing.assert_allclose(lm.encode(TEXTS, prompt_name=name), theirs, atol=1e-5)
    assert lm.encoder.pooling == "last"
    untouched = load(plain)
    assert lm.generate("the", 4)[0].token_ids == untouched.generate("the", 4)[0].token_ids
    assert lm.weights_hash == untouched.weights_hash
    lm.save(tmp_path / "saved")
    assert load(tmp_path / "saved").fingerprint() == lm.fingerprint()


def test_its_base_is_found_next_to_it_and_in_the_hubs_cache(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(make_adapter(base, tmp_path / "lora", task_type="CAUSAL_LM")).encode(TEXTS)
    change(tmp_path / "lora" / "adapter_config.json", base_model_name_or_path="someone/base")
    assert np.array_equal(load(tmp_path / "lora").encode(TEXTS), expected)
    snapshot = tmp_path / "hub" / "models--someone--model" / "snapshots" / "c1899de2"
    snapshot.parent.mkdir(parents=True)
    base.rename(snapshot)
    monkeypatch.setattr(
        "huggingface_hub.try_to_load_from_cache",
        lambda name, file, **_: (
            str(snapshot / file) if name == "someone/base" and (snapshot / file).is_file() else None
        ),
    )
    assert np.array_equal(load(tmp_path / "lora").encode(TEXTS), expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_model_name_or_path": None}, "names no model; give its base model, and this folder"),
        (
            {"base_model_name_or_path": "someone/large-model"},
            r"is an adapter for someone/large-model, which is not on this machine; fetch it \(hf download someone",
        ),
        ({"task_type": "SEQ_CLS"}, "says task_type SEQ_CLS, which is not to generate or to embed"),
    ],
)
def test_what_cannot_be_opened_is_refused(base: Path, tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = make_adapter(base, tmp_path / "lora", task_type="CAUSAL_LM")
    change(folder / "adapter_config.json", **changes)
    with pytest.raises(ModelError, match=words):
        load(folder)


def test_broken_adapters(base: Path, tmp_path: Path) -> None:
    other = save_tiny(tmp_path / "other", "mistral", sliding_window=None, hidden_size=64)
    folder = make_adapter(base, tmp_path / "lora", task_type="CAUSAL_LM")
    change(folder / "adapter_config.json", base_model_name_or_path=str(other))
    with pytest.raises(ModelError, match="does not fit this model"):
        load(folder)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(DataError, match=r"has no adapter_model\.safetensors"):
        load(folder)
    (folder / "adapter_config.json").write_text("[")
    with pytest.raises(DataError, match="is not valid JSON"):
        load(folder)


# ------------------------------------------------------------------------------------------------------------ LLM2Vec


def llm2vec(folder: Path, base: str) -> tuple[Path, PreTrainedModel]:
    """Write base, MNTP and SimCSE adapters as they are published; return the last folder and the merged encoder."""
    plain = save_tiny(folder / base, "mistral", sliding_window=None, max_position_embeddings=512)
    change(plain / "tokenizer_config.json", model_max_length=512)
    first = adapter(plain, folder / "LLM2Vec-Tiny-mntp", f"someone/{base}", seed=1)
    write(first / "config.json", {"auto_map": {"AutoModel": "modeling_mistral_encoder.MistralEncoderModel"}})
    merged = PeftModel.from_pretrained(AutoModel.from_pretrained(plain, dtype=torch.float32), first).merge_and_unload()
    # The second training names the model, and not the adapter that it began with.
    second = adapter(merged, folder / "LLM2Vec-Tiny-mntp-supervised", f"someone/{base}", seed=2, r=2, lora_alpha=16,
                     target_modules=["q_proj", "down_proj"])  # fmt: skip
    both = AutoModel.from_pretrained(plain, dtype=torch.float32)
    for one in (first, second):
        both = PeftModel.from_pretrained(both, one).merge_and_unload()
    both.config.is_causal = False
    return second, both.eval()


def encoded(model: PreTrainedModel, text: str, instruction: str, around: tuple[str, str]) -> np.ndarray:
    """Return the vector of a text as LLM2Vec computes it: the mean of the states of the text and what follows it."""
    tokenizer = byte_tokenizer()
    ids = tokenizer(around[0] + (f"{instruction} " if instruction else "") + text + around[1]).input_ids
    count = len(tokenizer(text + around[1], add_special_tokens=False).input_ids)
    with torch.no_grad():
        states = model(torch.tensor([ids])).last_hidden_state[0]
    vector = states[-count:].mean(0).numpy()
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize(
    ("base", "around"),
    [("Mistral-7B-Instruct-v0.2", ("[INST] ", " [/INST]")), pytest.param("Sheared", ("", ""), marks=pytest.mark.slow)],
)
def test_llm2vec_encodes_with_both_adapters_and_generates_with_none(
    tmp_path: Path, base: str, around: tuple[str, str]
) -> None:
    folder, both = llm2vec(tmp_path, base)
    lm = load(folder)
    assert (lm.encoder.attention.name, lm.encoder.max_length) == ("bidir", 512)
    # LLM2Vec counts the tokens of a text alone, so none may hold the space before it too.
    texts = ["cat on the mat", "x", "zürich 数据库, and another thing"]
    task = "Given a web search query, retrieve relevant passages that answer the query:"
    for name, instruction in ((None, ""), ("document", ""), ("query", task)):
        expected = [encoded(both, text, instruction, around) for text in texts]
        np.testing.assert_allclose(lm.encode(texts, prompt_name=name), expected, atol=2e-5)
    untouched = load(tmp_path / base)
    assert lm.generate("the", 4)[0].token_ids == untouched.generate("the", 4)[0].token_ids
    lm.save(tmp_path / "saved")
    assert load(tmp_path / "saved").fingerprint() == lm.fingerprint()
    assert gerund.load(lm.spec).fingerprint() == lm.fingerprint()


@pytest.mark.slow
def test_llm2vecs_settings_and_what_is_missing(tmp_path: Path) -> None:
    folder, _ = llm2vec(tmp_path, "Sheared")
    write(
        folder / "llm2vec_config.json", {"pooling_mode": "weighted_mean", "max_length": 40, "skip_instruction": False}
    )
    own = load(folder).encoder
    assert (own.pooling, own.max_length, own.pool_prompt) == ("weighted-mean", 40, True)
    write(folder / "llm2vec_config.json", {"pooling_mode": "bos_token"})
    with pytest.raises(ModelError, match="pools by 'bos_token'; gerund knows mean, weighted_mean, last_token"):
        load(folder)
    (folder / "llm2vec_config.json").unlink()
    assert load(tmp_path / "LLM2Vec-Tiny-mntp").encoder == load(folder).encoder  # word vectors, by one adapter
    (tmp_path / "LLM2Vec-Tiny-mntp").rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match="is an adapter for LLM2Vec-Tiny-mntp, which is not on this machine"):
        load(folder)


def test_only_plain_lora_is_stacked(base: Path, tmp_path: Path) -> None:
    one = adapter(base, tmp_path / "one", str(base))
    other = adapter(base, tmp_path / "other", str(base), use_dora=True)
    assert stacked([one]) == one
    with pytest.raises(ModelError, match="is no plain LoRA adapter"):
        stacked([one, other])
    both = stacked([one, one])
    assert both == stacked([one, one])
    config = json.loads((both / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (8, 8)


# ------------------------------------------------------------------------------------------------------------- GritLM


def test_gritlm_embeds_both_ways_and_generates_causally(tmp_path: Path) -> None:
    st = pytest.importorskip("sentence_transformers")
    template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}\n{% endfor %}<|assistant|>\n"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.model_max_length = 256
    settings: dict[str, Any] = {"tokenizer": tokenizer, "with_head": True, "sliding_window": None}
    prompt = "<|user|>\nGiven a web search query, retrieve relevant passages that answer the query\n<|embed|>\n"
    prompts = {"query": prompt, "document": "<|embed|>\n", "own": "<|user|>\nFind it\n<|embed|>\n"}
    changes = {"pooling": "mean", "include_prompt": False, "prompts": prompts, "max_position_embeddings": 256}
    folder = ready_made(tmp_path / "st", "mistral", max_seq_length=256, **settings, **changes)
    change(folder / "config.json", is_causal=False)
    theirs = st.SentenceTransformer(str(folder), device="cpu", model_kwargs={"dtype": torch.float32})
    expected = {name: theirs.encode(TEXTS, prompt_name=name) for name in prompts}
    tokens = AutoModelForCausalLM.from_pretrained(folder, is_causal=True, dtype=torch.float32).generate(
        torch.tensor([tokenizer.apply_chat_template([{"role": "user", "content": "the"}], return_dict=False)]),
        max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0,
    )[0, -5:].tolist()  # fmt: skip
    # As it is published: nothing in the folder says that it embeds both ways, but for the name of its code.
    for name in ("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"):
        (folder / name).unlink()
    change(folder / "config.json", is_causal=True, auto_map={"AutoModel": "modeling_gritlm7b.MistralModel"})
    lm = load(folder)
    assert lm.encoder.attention.name == "bidir"
    np.testing.assert_allclose(lm.encode(TEXTS, prompt_name="query"), expected["query"], atol=1e-5)
    np.testing.assert_allclose(lm.encode(TEXTS), expected["document"], atol=1e-5)
    np.testing.assert_allclose(lm.encode(TEXTS, prompt=prompts["own"]), expected["own"], atol=1e-5)
    [reply] = lm.chat([{"role": "user", "content": "the"}], 5)
    assert reply.token_ids == tokens
