"""A GGUF file is read as the model that it was written from; a damaged one is refused."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund import gguf_file
from gerund.errors import ModelError
from gerund.exporting.gguf import FILE_TYPES, write_file
from gerund.gguf_file import GgufFile, read_file
from gerund.models.encoder_settings import StoredSettings
from gerund.models.gguf_model import read_config
from gerund.models.gguf_tokenizer import read_tokenizer
from gerund.models.saved_settings import encoder_settings
from gerund.settings.encoder import EncoderConfig, GgufType
from gerund.settings.plan import AttentionPlan
from tests.cli.helpers import run_cli
from tests.tiny import save_tiny

LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0}
TEXTS = ["The old man looked at the sea.", "Prices rose by 3.14% in 2024, they said.", "naïve café", "  two  spaces"]


def write(lm: gerund.LanguageModel, path: Path, type: GgufType = "f32") -> Path:
    """Write a model as GGUF without asking llama.cpp, which its own tests do."""
    write_file(lm.runtime, path, FILE_TYPES[type])
    return path


@pytest.fixture(scope="module")
def tiny_file(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return write(gerund.load(tiny_folder), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 10.0, "original_max_position_embeddings": 16}}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_equal_to_the_folder(tmp_path: Path, kind: str, changes: dict) -> None:
    folder = gerund.load(save_tiny(tmp_path / "base", kind, **changes), dtype="float32")
    file = gerund.load(write(folder, tmp_path / "model.gguf"), dtype="float32")
    assert [file.tokenizer(text).input_ids for text in TEXTS] == [folder.tokenizer(text).input_ids for text in TEXTS]
    ids = torch.tensor([folder.tokenizer(TEXTS[1]).input_ids])
    with torch.no_grad():
        torch.testing.assert_close(file.model(ids).logits, folder.model(ids).logits, rtol=1e-4, atol=1e-5)
    assert torch.allclose(torch.tensor(file.encode(TEXTS)), torch.tensor(folder.encode(TEXTS)), atol=1e-5)
    assert folder.tokenizer.eos_token_id in file.model.generation_config.eos_token_id


def test_saved_and_opened_again(tmp_path: Path, tiny_file: Path) -> None:
    file = gerund.load(tiny_file)
    file.save(tmp_path / "folder")
    again = gerund.load(tmp_path / "folder")
    assert again.fingerprint() == file.fingerprint()
    assert again.generate("The old", max_new_tokens=5)[0].text == file.generate("The old", max_new_tokens=5)[0].text


def split(file: Path, folder: Path) -> list[Path]:
    """Write a file as two, as llama.cpp does it: only the first has metadata."""
    data = file.read_bytes()
    reader = gguf_file._Reader(memoryview(data))
    version, tensors, values = reader.numbers("<IQQ")
    begin = reader.place
    for _ in range(values):
        reader.text()
        reader.value(reader.number("<I"))
    table = reader.place
    for _ in range(tensors):
        gguf_file._tensor(reader, file)
    head = gguf_file.MAGIC + struct.pack("<IQQ", version, tensors, 0) + data[table : reader.place]
    paths = [folder / f"tiny-0000{number}-of-00002.gguf" for number in (1, 2)]
    paths[0].write_bytes(gguf_file.MAGIC + struct.pack("<IQQ", version, 0, values) + data[begin:table])
    paths[1].write_bytes(head + bytes(-len(head) % 32) + data[gguf_file._header(file)[2] :])
    return paths


def test_a_model_in_two_files(tmp_path: Path, tiny_file: Path) -> None:
    expected = gerund.load(tiny_file).encode(TEXTS)
    for path in (tmp_path, *split(tiny_file, tmp_path)):
        assert (gerund.load(path).encode(TEXTS) == expected).all()
    # A name like that of a part of none is only a name.
    whole = tmp_path / "other" / "tiny-00001-of-00000.gguf"
    whole.parent.mkdir()
    whole.write_bytes(tiny_file.read_bytes())
    assert (gerund.load(whole).encode(TEXTS) == expected).all()


def test_eight_bits_are_unpacked(tmp_path: Path) -> None:
    folder = gerund.load(save_tiny(tmp_path / "base", hidden_size=64, intermediate_size=64), dtype="float32")
    file = read_file(write(folder, tmp_path / "model.gguf", "q8_0"))
    assert file.types[0] == "Q8_0"
    name = "model.layers.0.mlp.up_proj.weight"
    weight = torch.from_numpy(file.tensors.read("blk.0.ffn_up.weight"))
    assert 0 < (weight - folder.model.state_dict()[name]).abs().max() < 0.01


def test_what_an_embedding_file_says(tiny_file: Path) -> None:
    file = read_file(tiny_file)

    def settings(**values: object) -> object:
        metadata = {**file.metadata, **{f"llama.{name.replace('__', '.')}": value for name, value in values.items()}}
        return encoder_settings(GgufFile(file.path, metadata, file.tensors))

    assert settings() is None
    spec = settings(pooling_type=3)
    assert (spec.attention, spec.pooling) == ("causal", "last")
    spec = settings(pooling_type=1, attention__causal=False)
    assert (spec.attention, spec.pooling) == ("bidir", "mean")
    with pytest.raises(ModelError, match="it is a reranker"):
        settings(pooling_type=4)


def test_another_plan_than_an_embedding_file_says_is_told(caplog: pytest.LogCaptureFixture) -> None:
    author = EncoderConfig(attention=AttentionPlan("causal"), pooling="last")
    reading = StoredSettings(author, file="model.gguf")
    reading.tell("model.gguf", author)
    assert not caplog.text
    reading.tell("model.gguf", replace(author, pooling="mean"))
    assert "read with pooling=mean, and not as its author means it, with pooling=last" in caplog.text


Change = Callable[[bytearray], object]


def damaged(tiny_file: Path, path: Path, change: Change) -> Path:
    data = bytearray(tiny_file.read_bytes())
    change(data)
    path.write_bytes(bytes(data))
    return path


def cut(length: int) -> Change:
    return lambda data: data.__delitem__(slice(length, None))


def put(form: str, *values: float, behind: bytes = b"", by: int = 0) -> Change:
    """Write numbers so many bytes behind a name, or behind the beginning."""
    return lambda data: struct.pack_into(form, data, data.index(behind) + len(behind) + by, *values)


def setting(key: str, form: str, kind: int, value: float) -> Change:
    """Give a setting another type and value, which stand behind its name."""
    return put(f"<I{form}", kind, value, behind=struct.pack("<Q", len(key)) + key.encode())


def renamed(old: bytes, new: bytes) -> Change:
    def change(data: bytearray) -> None:
        assert len(old) == len(new)
        assert old in data
        data[:] = data.replace(old, new)

    return change


def tokenizer_of(path: Path) -> object:
    return read_tokenizer(read_file(path))


VALUE = b"blk.0.attn_v.weight"
DAMAGED: list[tuple[Callable[[Path], object], Change, str]] = [
    *((read_file, cut(length), "the file is cut off") for length in (4, 20, 30, 400, -40)),
    (read_file, lambda data: data.__delitem__(slice(len(data) // 2, None)), "the file is cut off"),
    # Counts of tensors and of values that no file holds.
    *((read_file, put("<Q", 2**63, by=place), r"cut off or damaged|dimensions") for place in (8, 16)),
    (read_file, put("<I", 99, by=4), "version 99"),
    # Behind a tensor's name stand the number of its dimensions, these, its type and its place.
    (read_file, put("<I", 2**31, behind=VALUE), "dimensions"),
    (read_file, put("<I", 77, behind=VALUE, by=20), "is of type 77"),
    (read_file, put("<Q", 32, behind=VALUE, by=24), "overlaps another tensor"),
    (read_file, put("<Q", 2**62, behind=VALUE, by=24), "lies beyond its end"),
    (tokenizer_of, put("<Q", 200, behind=b"token_embd.weight", by=12), "other tokens than the 200 of its embeddings"),
    (tokenizer_of, renamed(b"ggml.tokens", b"ggml.tokenx"), "it has no tokenizer"),
    (gerund.load, renamed(b"llama", b"rwkv7"), "architecture 'rwkv7' are not read; give the folder"),
    (gerund.load, renamed(b"blk.1.ffn_up", b"blk.9.ffn_up"), "blk.1.ffn_up.weight is missing"),
    *(
        (gerund.load, setting(*given), message)
        for *given, message in [
            ("llama.block_count", "I", 4, 2**32 - 1, "block_count is 4294967295, which its tensors do not fit"),
            ("llama.block_count", "I", 4, 0, "block_count is 0, which its tensors do not fit"),
            ("llama.attention.head_count", "I", 4, 2**31, "head_count is 2147483648, which its tensors do not fit"),
            ("llama.rope.freq_base", "f", 6, float("nan"), "rope.freq_base is nan, not a number"),
            ("llama.attention.layer_norm_rms_epsilon", "f", 6, float("inf"), "epsilon is inf, not a number"),
            ("tokenizer.ggml.eos_token_id", "i", 5, -1, "eos_token_id is -1, and its tokens are 0 to 265"),
            ("tokenizer.ggml.bos_token_id", "f", 6, 1.5, "bos_token_id is 1.5, and its tokens are 0 to 265"),
            ("tokenizer.ggml.padding_token_id", "I", 4, 266, "padding_token_id is 266, and its tokens are 0 to 265"),
        ]
    ),
]


@pytest.mark.parametrize(("read", "change", "message"), DAMAGED)
def test_what_is_damaged_or_not_read(
    tmp_path: Path, tiny_file: Path, read: Callable[[Path], object], change: Change, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        read(damaged(tiny_file, tmp_path / "file.gguf", change))


def test_settings_of_another_type_are_refused(tiny_file: Path) -> None:
    file = read_file(tiny_file)

    def changed(**values: object) -> GgufFile:
        named = {f"llama.{key.replace('__', '.')}": value for key, value in values.items()}
        return GgufFile(file.path, {**file.metadata, **named}, file.tensors)

    for values in ({"rope__freq_base": "x"}, {"rope__freq_base": [1.0]}, {"rope__scaling__factor": True}):
        with pytest.raises(ModelError, match="not a number"):
            read_config(changed(**values))
    with pytest.raises(ModelError, match="pools in a way that is not known"):
        encoder_settings(changed(pooling_type=[1]))


def test_what_the_list_of_models_says(tmp_path: Path, tiny_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(tiny_file.read_bytes())
    damaged(tiny_file, folder / "other.gguf", renamed(b"llama", b"rwkv7"))
    monkeypatch.setenv("LLAMA_CACHE", str(folder))
    listed = {row["name"]: row["about"] for row in json.loads(run_cli("models", "--json").out)}
    assert "llama, " in listed["llama.cpp:tiny.gguf"]
    assert "; generates, embeds, infills and re-ranks" in listed["llama.cpp:tiny.gguf"]
    assert "rwkv7, " in listed["llama.cpp:other.gguf"]
    assert "an architecture that gerund does not read from GGUF" in listed["llama.cpp:other.gguf"]


@pytest.mark.parametrize("has_pread", [True, False])
def test_rows_are_read_without_their_neighbors(tiny_file: Path, monkeypatch: pytest.MonkeyPatch, has_pread: bool):
    if not has_pread:
        monkeypatch.delattr(gguf_file.os, "pread", raising=False)
    tensors = read_file(tiny_file).tensors
    stored, rows = tensors.stored("token_embd.weight"), tensors.rows_of("token_embd.weight")
    for numbers in ([5], [7, 2, 2, len(stored) - 1], []):
        assert (rows.read(np.array(numbers, np.int64)) == stored[numbers]).all()
    with pytest.raises(IndexError, match=f"rows 1 to {len(stored)} of {len(stored)}"):
        rows.read(np.array([len(stored), 1]))
