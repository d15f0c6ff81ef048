"""Whatever cannot be loaded is refused in one sentence before anything of it runs; no link leads out of a folder."""

import json
import logging
import os
import shutil
import threading
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as hf_logging

import gerund
from gerund import checks
from gerund.attention import interface
from gerund.cli.convert import _reports
from gerund.errors import ConfigError, DataError, ModelError, UnsupportedModelError
from gerund.inference.tokens import context_length
from gerund.models import folder_files, loading
from gerund.models.loading import original_files
from gerund.models.sources import Source, find
from gerund.models.vectors import unit
from gerund.models.weights import refuse_fetched_code
from gerund.progress import say_once
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.cli.helpers import run_cli, run_python
from tests.ready_made import change
from tests.threads import at_once
from tests.tiny import byte_tokenizer, save_tiny, tiny


def refusal(model: object, kind: type[Exception] = ModelError, **options) -> str:
    with pytest.raises(kind) as caught:
        gerund.load(model, **options)
    message = str(caught.value)
    assert message
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("name", ["./absent", "/absent/model", "a/b/c", "", Path("absent"), "The cat sat.", "cat."])
def test_no_such_folder(name: object) -> None:
    assert "there is no folder or file" in refusal(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    assert "holds no model: it has no config.json" in refusal(tmp_path)


@pytest.mark.parametrize("model", [5, b"model", ["model"]])
def test_what_names_no_model(model: object) -> None:
    assert f"a model is given by its name or its folder, not as {model!r}" in refusal(model, ConfigError)


@pytest.mark.parametrize("name", ["defualt", "Default", "defalt"])
def test_a_slip_in_the_name_of_the_bundled_model(name: str) -> None:
    assert refusal(name) == f"there is no model {name!r}; did you mean default?"


@pytest.mark.parametrize("name", ["gpt2", "ctrl", "someone/defualt"])
def test_other_names_are_the_hubs(name: str) -> None:
    assert find(name) == Source(name, None)


def test_default_is_the_bundled_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find("default") == find(Path("default")) == find(None)
    folder.rename(folder.parent / "default")
    monkeypatch.chdir(folder.parent)
    assert find("default") == find(None)
    assert find("./default").folder == Path("default")
    assert find(Path("./default")).folder == Path("default")


def test_a_folder_with_model_and_adapter(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    assert "a model and an adapter" in refusal(folder)


BERT = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16, vocab_size=300)
T5 = dict(d_model=16, d_kv=8, d_ff=16, num_layers=2, num_heads=2, vocab_size=300)
BART = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
            vocab_size=300, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sizes", "name", "says"),
    [
        ("bert", BERT, "BertForMaskedLM", "is an encoder (BertForMaskedLM)"),
        ("bert", BERT, "BertModel", "is an encoder (bert) and does not generate"),  # as all-MiniLM-L6-v2 is published
        ("bart", BART, "BartForConditionalGeneration", "is a bart model, not a decoder-only"),
        ("t5", T5, "T5EncoderModel", "is a T5EncoderModel; give a T5 with encoder, decoder and output head"),
    ],
)
def test_models_of_other_kinds(tmp_path: Path, kind: str, sizes: dict[str, int], name: str, says: str) -> None:
    getattr(transformers, name)(AutoConfig.for_model(kind, **sizes)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert says in refusal(tmp_path)


def test_a_decoder_that_sees_both_ways(tmp_path: Path) -> None:
    lm = gerund.load(save_tiny(tmp_path, is_causal=False), dtype="float32")
    assert lm.encoder.attention.name == "bidir"
    with pytest.raises(ModelError, match=r"attends in both directions.*it encodes, but cannot generate"):
        lm.generate("a")


def test_code_in_the_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "modeling_own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    own = {"AutoConfig": "modeling_own.Own", "AutoModelForCausalLM": "modeling_own.Own"}
    change(folder / "config.json", model_type="own", auto_map=own)
    assert "it needs code of its own, which is not run" in refusal(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
def test_damaged_weights(folder: Path, damage: str) -> None:
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "noise": b"x" * 100, "empty": b""}[damage])
    assert refusal(folder).startswith(f"cannot load {folder}")


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    assert "model.layers.1.mlp.up_proj.weight missing from its weights" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_damaged_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text, encoding="latin-1")
    assert refusal(folder).startswith("cannot read the config of")


@pytest.mark.parametrize("form", ["{}", "_{}", "_{}_internal"])
@pytest.mark.parametrize("key", ["attn_implementation", "experts_implementation"])
def test_a_config_does_not_choose_code_from_the_hub(folder: Path, key: str, form: str) -> None:
    change(folder / "config.json", **{form.format(key): "someone/kernel:function"})
    config = loading.read_config(find(folder))
    assert config._attn_implementation is config._experts_implementation is None
    assert not any("kernel" in str(value) for value in vars(config).values())
    assert gerund.load(folder, dtype="float32").encode("a cat").any()


@pytest.mark.parametrize("name", ["config.json", "sentence_bert_config.json", "0_Transformer/config.json"])
def test_nor_for_sentence_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    source = Source(str(tmp_path), tmp_path)
    path.write_text(json.dumps({"attn_implementation": "sdpa", "model_args": {"dtype": "float32"}}))
    refuse_fetched_code(source)
    path.write_text(json.dumps({"model_args": {"attn_implementation": "someone/kernel"}}))
    with pytest.raises(ModelError, match=f"{path.name} has its attention computed by code of the hub"):
        refuse_fetched_code(source)
    pytest.importorskip("sentence_transformers")
    from gerund.inference.sentence_encoder import SentenceEncoder

    with pytest.raises(ModelError, match="by code of the hub"):
        SentenceEncoder(str(tmp_path))


def test_nor_do_the_configs_inside_it(tmp_path: Path) -> None:
    data = AutoConfig.for_model("gemma3").to_dict()
    for part in (data, data["text_config"], data["vision_config"]):
        part |= {"attn_implementation": "someone/kernel", "_experts_implementation": {"": "someone/kernel"}}
    (tmp_path / "config.json").write_text(json.dumps(data))
    config = loading.read_config(Source("x", tmp_path))
    for part in (config, config.text_config, config.vision_config):
        assert part._attn_implementation is part._experts_implementation is None
    assert config.text_config.hidden_size == AutoConfig.for_model("gemma3").text_config.hidden_size


def test_the_type_that_is_changed_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A processor without bfloat16 computes in float32, in which other texts may come out."""
    folder = tmp_path / "model"
    tiny("llama", vocab_size=266).to(torch.bfloat16).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    say_once.cache_clear()
    assert gerund.load(folder).model.dtype == (torch.bfloat16 if interface.cpu_has_bfloat16() else torch.float32)
    monkeypatch.setattr(interface, "cpu_has_bfloat16", lambda: False)
    assert gerund.load(folder).model.dtype == torch.float32
    ran = run_cli("generate", "a cat", "--max-new-tokens", 1, "-m", folder)
    assert (ran.code, ran.err) == (0, "")
    for dtype in ("float32", "bfloat16"):
        assert gerund.load(folder, dtype=dtype).model.dtype == getattr(torch, dtype)


def test_unknown_architecture(folder: Path) -> None:
    change(folder / "config.json", model_type="nonesuch")
    assert "nonesuch" in refusal(folder)


def test_no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "cannot load the tokenizer" in refusal(folder)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        ("{", DataError, "is not valid JSON"),
        ("[]", DataError, "has no 'encoder' entry"),
        ('{"format": 2, "encoder": {}}', ConfigError, "has format 2; this version of gerund reads format 1"),
        ('{"encoder": {}}', ConfigError, "has format None"),
        ('{"format": 1, "encoder": {"pooling": "class"}}', ConfigError, "unknown pooling 'class'"),
        ('{"format": 1, "encoder": {"colour": 1}}', ConfigError, "unknown field in gerund.json 'colour'"),
        ('{"format": 1, "encoder": {"attention": {"name": "x"}}}', ConfigError, "unknown attention plan 'x'"),
        ('{"format": 1, "encoder": {"attention": {"size": 1}}}', ConfigError, "field of an attention plan 'size'"),
        ('{"format": 1, "encoder": {"attention": 3}}', ConfigError, "attention"),
        ('{"format": 1, "encoder": {"prompts": 3}}', ConfigError, "prompts"),
        ('{"format": 1, "encoder": {"max_length": "x"}}', ConfigError, "max_length"),
        ('{"format": 1, "encoder": {"prompt": null}}', ConfigError, "prompt"),
        ('{"format": 1, "encoder": []}', DataError, "encoder"),
        ('{"format": 1, "encoder": {"adapter": "../elsewhere"}}', ConfigError, "adapter"),
    ],
)
def test_damaged_settings(folder: Path, text: str, kind: type[Exception], says: str) -> None:
    (folder / "gerund.json").write_text(text)
    assert says in refusal(folder, kind)


def test_settings_that_name_an_absent_adapter(folder: Path) -> None:
    (folder / "gerund.json").write_text('{"format": 1, "encoder": {"adapter": "adapter"}}')
    assert "is not an adapter folder" in refusal(folder, DataError)


def test_unknown_names(folder: Path) -> None:
    assert "unknown dtype 'int4'; valid are: auto, float32" in refusal(folder, ConfigError, dtype="int4")
    assert "unknown pooling 'class'" in refusal(folder, ConfigError, pooling="class")
    assert "unknown attention plan 'all'" in refusal(folder, ConfigError, attention="all")
    for device in ("toaster", "", "cuda:x"):
        said = f"device {device!r} cannot be used here; take auto, cpu, cuda (or cuda:1) or mps"
        assert refusal(folder, ConfigError, device=device) == said
    assert refusal(folder, ConfigError, device=[]) == "device is a text, not []"
    assert "k=5 is larger than the model's 4 layers" in refusal(folder, ConfigError, k=5)


def test_loading_is_quiet_and_leaves_the_logger_as_it_was(folder: Path, capfd) -> None:
    level = logging.getLogger("transformers").level
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gerund.load(folder, dtype="float32").save(folder.parent / "out")
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("transformers").level == level
    assert hf_logging.is_progress_bar_enabled()


def test_quiet_in_many_threads_ends_as_it_began() -> None:
    def work() -> None:
        for _ in range(200):
            with loading.quiet():
                assert not hf_logging.is_progress_bar_enabled()

    at_once([work] * 8)
    assert hf_logging.is_progress_bar_enabled()


def test_files_worth_copying(folder: Path) -> None:
    for name in ("pytorch_model.bin", "model.fp16.safetensors", "gerund.json", "modules.json", ".hidden.json", "x.py"):
        (folder / name).write_text("{}")
    (folder / "LICENSE").write_text("free")
    names = {path.name for path in loading.original_files(find(folder))}
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "LICENSE"}
    assert names == {*expected, "tokenizer_config.json"}


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_an_embedding_model_without_a_head_encodes_and_says_that_it_cannot_generate(tmp_path):
    whole = save_tiny(tmp_path / "whole", tie_word_embeddings=False)
    lm = gerund.load(whole, dtype="float32")
    body = tmp_path / "body"
    lm.model.model.save_pretrained(body)  # as MistralModel and the like are published
    lm.tokenizer.save_pretrained(body)
    headless = gerund.load(body, dtype="float32")
    assert (headless.encode(["the cat"]) == lm.encode(["the cat"])).all()
    for attempt in (lambda: headless.generate("the cat"), lambda: list(headless.stream("the cat"))):
        with pytest.raises(ModelError, match="saved without an output head: it encodes, but cannot generate"):
            attempt()
    headless.save(tmp_path / "again")
    again = gerund.load(tmp_path / "again", dtype="float32")
    assert (again.encode(["the cat"]) == lm.encode(["the cat"])).all()
    with pytest.raises(ModelError, match="cannot generate"):
        again.generate("the cat")
    adapter = make_adapter(whole, tmp_path / "adapter")
    adapted = [gerund.load(folder, adapter=adapter, dtype="float32").encode(["the cat"]) for folder in (whole, body)]
    assert (adapted[0] == adapted[1]).all()
    assert not (adapted[0] == lm.encode(["the cat"])).all()


def test_last_states_that_are_projected_to_another_size(tmp_path):
    """As those of facebook/opt-350m are."""
    folder = save_tiny(tmp_path / "opt", "opt", word_embed_proj_dim=16, do_layer_norm_before=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    lm = gerund.load(folder, attention="causal", dtype="float32")
    ids = torch.tensor([lm.tokenizer("the cat").input_ids])
    expected = unit(model.base_model(ids).last_hidden_state[0].mean(0).detach().numpy())
    assert lm.dimensions == 16
    assert lm.encode(["the cat"])[0] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(UnsupportedModelError, match=r"`layers` and `prepend` can.t be used with it"):
        gerund.load(folder, attention="causal", layers="1").encode(["the cat"])


@pytest.mark.parametrize(("kind", "name"), [("mpt", "max_seq_len"), ("gpt2", "n_positions")])
def test_the_longest_text_in_an_architectures_own_words(kind, name):
    tokenizer = byte_tokenizer()
    assert context_length(AutoConfig.for_model(kind, **{name: 33}), tokenizer) == 33


WITHOUT_ONNX = """
import sys
sys.modules.update({"onnx": None, "onnxruntime": None})
import gerund
lm = gerund.load(sys.argv[1])
ranking = lm.rerank("cat", ["a", "b"], by="lift")
print(lm.encode("the cat").ndim, len(lm.generate("the", max_new_tokens=2)), len(ranking))
"""


def test_torch_needs_no_onnx_runtime(tiny_folder: Path):
    assert run_python("-c", WITHOUT_ONNX, tiny_folder).stdout == "1 1 2\n"


SECRET = "the key of the house"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A file of the user's that is no part of any model."""
    path = tmp_path / "home" / "secret"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


@pytest.mark.parametrize(
    "name", ["LICENSE", "README.md", "chat_template.jinja", "special_tokens_map.json", "vocab.txt"]
)
def test_a_link_out_of_the_folder_is_neither_read_nor_copied(folder: Path, secret: Path, name: str) -> None:
    (folder / name).symlink_to(secret)
    said = run_cli("convert", folder, folder.parent / "out", "--attention", "causal").mistake
    assert said.startswith(f"{folder / name} is a link that leads out of ")
    assert not (folder.parent / "out").exists()
    with pytest.raises(ModelError, match="leads out of its folder"):
        original_files(Source("x", folder))


def test_chains_and_linked_folders(folder: Path, secret: Path) -> None:
    (folder / "chain").symlink_to(secret)
    (folder / "LICENSE").symlink_to("chain")
    assert "chain is a link that leads out" in refusal(folder) or "LICENSE is a link" in refusal(folder)
    for name in ("chain", "LICENSE"):
        (folder / name).unlink()
    (secret.parent / "a.jinja").write_text(SECRET)
    (folder / "additional_chat_templates").symlink_to(secret.parent)
    assert "additional_chat_templates is a link that leads out" in refusal(folder)
    (folder / "additional_chat_templates").unlink()
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "a.jinja").symlink_to(secret.parent / "a.jinja")
    assert "a.jinja is a link that leads out" in refusal(folder)


def test_links_inside_the_folder_and_to_the_folder_itself(folder: Path, tmp_path: Path) -> None:
    (folder / "text.md").write_text("read me")
    (folder / "README.md").symlink_to("text.md")
    (tmp_path / "linked").symlink_to(folder)
    assert find(tmp_path / "linked").folder == tmp_path / "linked"
    assert run_cli("convert", tmp_path / "linked", tmp_path / "out", "--attention", "causal").code == 0
    assert (tmp_path / "out" / "README.base.md").read_text() == "read me"
    assert not (tmp_path / "out" / "README.base.md").is_symlink()


def in_a_cache(tiny_folder: Path, cache: Path) -> Path:
    """Return the snapshot of the tiny model in a folder that is laid out as the hub's cache is."""
    repository = cache / "models--someone--tiny"
    snapshot, blobs = repository / "snapshots" / "0123abc", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(tiny_folder.iterdir())):
        shutil.copyfile(path, blobs / f"{number:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:040x}")
    return snapshot


def test_a_snapshot_of_the_hubs_cache(
    tiny_folder: Path, tmp_path: Path, secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = in_a_cache(tiny_folder, tmp_path / "hub")
    names = {path.name for path in tiny_folder.iterdir()}
    assert {path.name for path in original_files(find(snapshot))} == names
    # Files that were put elsewhere as links to this user's own cache.
    own = tmp_path / "own"
    own.mkdir()
    for path in snapshot.iterdir():
        (own / path.name).symlink_to(path.resolve())
    with pytest.raises(ModelError, match="leads out of its folder"):
        find(own)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert find(own).folder == own
    # A stranger may lay a folder out as a cache.
    blob = (snapshot / "config.json").resolve()
    blob.unlink()
    blob.symlink_to(secret)
    with pytest.raises(ModelError, match=r"config\.json is a link that leads out of its folder"):
        find(snapshot)
    shutil.rmtree(blob.parent)
    blob.parent.symlink_to(secret.parent)
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../blobs/secret")
    monkeypatch.undo()
    with pytest.raises(ModelError, match=r"config\.json is a link that leads out of its folder"):
        find(snapshot)


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_an_adapter_with_a_link(tiny_folder: Path, tmp_path: Path, secret: Path) -> None:
    adapter = make_adapter(tiny_folder, tmp_path / "adapter")
    shutil.move(adapter / "adapter_model.safetensors", secret.parent)
    (adapter / "adapter_model.safetensors").symlink_to(secret.parent / "adapter_model.safetensors")
    assert "adapter_model.safetensors is a link that leads out" in refusal(tiny_folder, adapter=adapter)


def test_the_record_of_another_models_training(tmp_path: Path, secret: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "training.json").symlink_to(secret)
    with pytest.raises(ModelError, match=r"training\.json is a link that leads out"):
        _reports(str(other), None)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors", "training.json", "LICENSE"])
def test_a_pipe_is_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    assert refusal(folder) == f"{folder / name} is not a regular file; remove it from the model's folder"


def test_a_link_to_itself(folder: Path) -> None:
    (folder / "README.md").symlink_to("README.md")
    assert "README.md cannot be read" in refusal(folder) or "README.md is a link" in refusal(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if os.geteuid() == 0:  # who may read everything
        monkeypatch.setattr(folder_files.os, "access", lambda path, mode: Path(path).name != name)
    else:
        (folder / name).chmod(0)
    assert refusal(folder) == f"{folder / name} cannot be read: permission denied"


def test_an_input_that_is_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a writer it is read; without one nobody waits for ever."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writing = threading.Thread(target=lambda: pipe.write_text("a\nb\n"))
    writing.start()
    assert checks.read_sample(pipe) == ["a", "b"]
    writing.join()
    monkeypatch.setattr(checks, "_SECONDS_FOR_A_WRITER", 0.05)
    for read in (checks.read_sample, checks.read_json):
        with pytest.raises(DataError, match="pipe is a pipe that nothing writes to"):
            read(pipe)
