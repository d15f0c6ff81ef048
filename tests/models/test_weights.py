"""Weights that cannot be used are refused in one true sentence, by what is in their headers, within seconds."""

import json
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import gerund
from gerund.errors import ModelError
from gerund.models import loading
from gerund.models.heads import ProjectionHead, read_head
from gerund.models.light_head import HeadConfig
from gerund.models.sources import find
from gerund.models.weights import WEIGHTS, shards_of
from tests.ready_made import change
from tests.tiny import byte_tokenizer, save_tiny, save_tiny_t5

INDEX = "model.safetensors.index.json"


def refusal(model: Path, kind: type[Exception] = ModelError) -> str:
    start = time.process_time()
    with pytest.raises(kind) as caught:
        gerund.load(model, dtype="float32")
    assert time.process_time() - start < 5
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) <= 300
    return message


def spoil(folder: Path, **changes: torch.Tensor) -> None:
    weights = load_file(folder / WEIGHTS)
    weights |= {key: value.expand_as(weights[key]).clone() for key, value in changes.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})


def shard(folder: Path, name: object) -> None:
    """Let an index name ``name`` as the file of every tensor."""
    names = dict.fromkeys(load_file(folder / WEIGHTS), name)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": names}))


class Boom:
    """Leaves a trace when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    "outside", ["../w.safetensors", "{tmp}/w.safetensors", "a/../../w.safetensors", "C:\\w.safetensors"]
)
@pytest.mark.parametrize("there", [True, False])
def test_an_index_leads_nowhere_outside_its_folder(folder: Path, tmp_path: Path, outside: str, there: bool) -> None:
    outside = outside.format(tmp=tmp_path)
    shard(folder, outside)
    place = tmp_path / "w.safetensors"
    (folder / WEIGHTS).rename(place)
    if not there:
        place.unlink()
    assert refusal(folder) == f"cannot load {folder}: its {INDEX} names weights outside the folder: {outside}"


@pytest.mark.parametrize("name", ["x.bin", "x.pt", "x.safetensors.bin", "x"])
def test_an_index_of_other_files_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    shard(folder, name)
    (folder / WEIGHTS).unlink()
    torch.save({"weight": Boom(tmp_path / "opened")}, folder / name)
    assert refusal(folder) == f"cannot load {folder}: its {INDEX} names {name}; only safetensors files are opened"
    assert not (tmp_path / "opened").exists()


@pytest.mark.parametrize("name", [5, None, ["a"], {}, "a\0.safetensors"])
def test_an_index_that_names_no_file(folder: Path, name: object) -> None:
    shard(folder, name)
    (folder / WEIGHTS).unlink()
    assert f"its {INDEX} names" in refusal(folder)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": 3}', "[" * 200_000])
def test_an_index_that_is_none(folder: Path, text: str) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(text)
    assert INDEX in refusal(folder)


def test_an_index_without_metadata(folder: Path) -> None:
    shard(folder, WEIGHTS)
    index = folder / INDEX
    (folder / WEIGHTS).rename(folder / "w.safetensors")
    names = dict.fromkeys(load_file(folder / "w.safetensors"), "w.safetensors")
    index.write_text(json.dumps({"weight_map": names}))
    said = f'{index} lacks the field metadata, without which it is not read; add "metadata": {{}} to it'
    assert refusal(folder) == said
    index.write_text(json.dumps({"weight_map": names, "metadata": {}}))
    assert gerund.load(folder, dtype="float32").encode("a cat").any()


def test_an_index_names_what_is_not_there(folder: Path) -> None:
    shard(folder, "absent.safetensors")
    (folder / WEIGHTS).unlink()
    assert refusal(folder) == f"cannot load {folder}: its index of weights names absent.safetensors, which is not there"


@pytest.mark.parametrize("inside", ["part.safetensors", "parts/1.safetensors"])
def test_shards_inside_the_folder_are_read(folder: Path, inside: str) -> None:
    shard(folder, inside)
    (folder / inside).parent.mkdir(exist_ok=True)
    (folder / WEIGHTS).rename(folder / inside)
    assert shards_of(folder / INDEX) == [inside]
    assert gerund.load(folder, dtype="float32").encode("a cat").any()


@pytest.mark.parametrize("name", ["../w.safetensors", "/w.safetensors", "w.bin", 5])
def test_a_config_leads_nowhere_outside_its_folder(folder: Path, name: object) -> None:
    change(folder / "config.json", transformers_weights=name)
    assert "config.json names" in refusal(folder)


def test_what_is_copied_stays_within_the_folder(folder: Path) -> None:
    shard(folder, "../w.safetensors")
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="outside the folder"):
        loading.original_files(find(folder))


def test_pickled_weights_are_named(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    torch.save({"weight": Boom(folder / "opened")}, folder / "pytorch_model.bin")
    said = (
        "it has no safetensors weights, only pytorch_model.bin, which may run code when it is opened; convert it first"
    )
    assert refusal(folder) == f"cannot load {folder}: {said}"
    assert not (folder / "opened").exists()
    (folder / "pytorch_model.bin").unlink()
    assert refusal(folder) == f"cannot load {folder}: it has no safetensors weights"


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize(
    "key", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"]
)
def test_weights_that_are_not_finite(tmp_path: Path, key: str, value: str) -> None:
    folder = save_tiny(tmp_path / "model", tie_word_embeddings=False)
    spoil(folder, **{key: torch.tensor(float(value))})
    assert refusal(folder) == f"cannot load {folder}: {key} holds numbers that are not finite (NaN or infinity)"


def test_one_number_that_is_none(tmp_path: Path) -> None:
    """The probe sees it where the look at places does not."""
    folder = save_tiny(tmp_path / "model", intermediate_size=6000, num_hidden_layers=2)
    key = "model.layers.1.mlp.up_proj.weight"
    weight = load_file(folder / WEIGHTS)[key]
    weight[3001, 1] = float("nan")
    spoil(folder, **{key: weight})
    assert refusal(folder) == f"this model's weights are damaged: {key} holds numbers that are not finite"


@pytest.mark.parametrize(
    ("key", "factor", "first"),
    [
        ("model.embed_tokens.weight", 1e10, "embed_tokens"),
        ("model.layers.1.self_attn.v_proj.weight", 1e20, "layers.1.self_attn.v_proj"),
        ("model.layers.1.mlp.down_proj.weight", 1e30, "layers.1.mlp.down_proj"),
        ("model.norm.weight", 1e30, "norm"),
    ],
)
def test_states_that_overflow(folder: Path, key: str, factor: float, first: str) -> None:
    spoil(folder, **{key: load_file(folder / WEIGHTS)[key] * factor})
    said = f"this llama model's states overflow, or are too large for float32, from {first} on: its weights are damaged"
    assert refusal(folder) == said


def test_large_states_in_half_precision(folder: Path) -> None:
    """Some published models have states of thousands, whose squares float16 does not hold."""
    key = "model.embed_tokens.weight"
    spoil(folder, **{key: load_file(folder / WEIGHTS)[key] * 2000})
    lm = gerund.load(folder, dtype="float16")
    assert float(lm.model.get_input_embeddings().weight.detach().abs().max()) > 256
    assert gerund.load(folder, dtype="float32").similarity("a cat", lm.encode(["a cat"])) > 0.99


def test_embeddings_of_zeros(folder: Path) -> None:
    spoil(folder, **{"model.embed_tokens.weight": torch.zeros(())})
    assert refusal(folder) == f"cannot load {folder}: its input embeddings are all zero"


def test_a_layer_of_zeros(folder: Path) -> None:
    zeros = {key: torch.zeros(()) for key in load_file(folder / WEIGHTS) if ".layers.2." in key}
    spoil(folder, **zeros)
    message = refusal(folder)
    assert message.startswith("this model's weights are damaged: model.layers.2.")
    assert message.endswith("is all zero, so its layer mixes no tokens")


def test_a_tokenizer_that_is_larger_than_the_embeddings(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    rows = len(byte_tokenizer())
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<one>", "<two>"])
    tokenizer.save_pretrained(folder)
    said = f"its tokenizer has {rows + 2} tokens, and the model embeddings for {rows}"
    assert refusal(folder) == f"cannot load {folder}: {said}"


def test_a_token_without_an_embedding_in_any_of_a_tokenizers_files(tmp_path: Path) -> None:
    rows = len(byte_tokenizer())
    for name, file, settings in (
        ("pad", "tokenizer_config.json", {"pad_token": "[PAD]"}),
        ("settings", "tokenizer_config.json", {"eos_token": {"__type": "AddedToken", "content": "[END]"}}),
        ("several", "tokenizer_config.json", {"extra_special_tokens": ["<zzx>"]}),
        ("added", "added_tokens.json", {"<zzx>": rows}),
    ):
        folder = save_tiny(tmp_path / name)
        path = folder / file
        path.write_text(json.dumps({**(json.loads(path.read_text()) if path.is_file() else {}), **settings}))
        assert f"its tokenizer has {rows + 1} tokens, and the model embeddings for {rows}" in refusal(folder), name


def test_a_vocabulary_whose_numbers_go_beyond_the_embeddings(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.__getitem__)] = 9000
    path.write_text(json.dumps(content), encoding="utf-8")
    assert "its tokenizer has 9001 tokens" in refusal(folder)


@pytest.mark.parametrize(
    "sizes",
    [
        {"num_hidden_layers": 10**9},
        {"num_hidden_layers": 9_000},
        {"hidden_size": 10**9},
        {"hidden_size": 10**30},
        {"vocab_size": 10**9},
        {"intermediate_size": 10**12},
        {"num_attention_heads": 10**9},
        {"num_key_value_heads": 10**9},
        {"head_dim": 10**9},
        {"num_labels": 10**9},
    ],
    ids=str,
)
def test_a_config_of_absurd_sizes(folder: Path, sizes: dict[str, int]) -> None:
    change(folder / "config.json", **sizes)
    message = refusal(folder)
    assert message.startswith(f"cannot load {folder}: its config.json") or "cannot read the config" in message


def test_absurd_sizes_of_an_architecture_with_lists_of_layers(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model", "qwen2")
    change(folder / "config.json", num_hidden_layers=10**9)
    assert refusal(folder).endswith("its config.json says num_hidden_layers 1000000000, which no model has")


@pytest.mark.parametrize("sizes", [{"d_model": 10**9}, {"num_layers": 10**9}, {"num_decoder_layers": 9_000}], ids=str)
def test_a_t5_of_absurd_sizes(tmp_path: Path, sizes: dict[str, int]) -> None:
    folder = save_tiny_t5(tmp_path / "t5")
    change(folder / "config.json", **sizes)
    assert "its config.json" in refusal(folder)


def test_the_tensor_that_differs_is_named(folder: Path) -> None:
    change(folder / "config.json", intermediate_size=96)
    said = "its config.json makes model.layers.0.mlp.gate_proj.weight 96x32, and its weights have 48x32"
    assert refusal(folder) == f"cannot load {folder}: {said}"


@pytest.mark.parametrize("settings", [{"eos_token_id": "x"}, {"max_length": "long"}, {"temperature": "hot"}], ids=str)
def test_a_generation_config_of_texts(folder: Path, settings: dict[str, object]) -> None:
    change(folder / "generation_config.json", **settings)
    [(key, value)] = settings.items()
    said = f"{key} in its generation_config.json is a number, not {value!r}"
    assert refusal(folder) == f"cannot load {folder}: {said}"


@pytest.mark.parametrize("width", [10**6, 64])
def test_a_head_that_is_larger_than_its_weights(tmp_path: Path, width: int) -> None:
    ProjectionHead(HeadConfig(width=32, dimensions=8)).save(tmp_path)
    path = tmp_path / "head.json"
    path.write_text(path.read_text().replace('"width": 32', f'"width": {width}'))
    with pytest.raises(gerund.DataError, match=r"inner\.weight"):
        read_head(tmp_path)
    path.write_text(path.read_text().replace(f'"width": {width}', f'"width": {10**9}'))
    with pytest.raises(gerund.ConfigError, match="a head's width is a whole number from 1 to"):
        read_head(tmp_path)


def test_a_head_that_is_not_finite(tmp_path: Path) -> None:
    head = ProjectionHead(HeadConfig(width=32, dimensions=8))
    torch.nn.init.constant_(head.outer.weight, float("nan"))
    head.save(tmp_path)
    with pytest.raises(gerund.DataError, match=r"outer\.weight holds numbers that are not finite"):
        read_head(tmp_path)
