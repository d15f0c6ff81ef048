"""A damaged GGUF file is refused by an error of gerund's, whatever is wrong with it."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import gerund
from gerund import gguf_file
from gerund.errors import GerundError, ModelError
from gerund.gguf_file import read_file
from gerund.models.gguf_model import read_config
from tests.models.gguf_writer import tensors, write_gguf
from tests.models.test_gguf_architectures import CASES, TOKENIZER, built, opened


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    arch, kind, config = CASES["granitehybrid"]
    return write_gguf(built(kind, config), TOKENIZER, tmp_path_factory.mktemp("gguf") / "whole.gguf", arch)


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4))
def test_bytes_of_the_header(tmp_path: Path, whole: Path, changes: list[tuple[float, int]]) -> None:
    data = bytearray(whole.read_bytes())
    begin, end = len(gguf_file.MAGIC), gguf_file._header(whole)[2]
    for place, byte in changes:
        data[begin + int(place * (end - begin))] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(bytes(data))
    try:
        gerund.load(path, attention="causal")
    except GerundError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


@pytest.mark.parametrize(
    ("case", "key", "value", "message"),
    [
        ("granitehybrid", "embedding_length", 0, "embedding_length is 0, which its tensors do not fit"),
        ("granitehybrid", "ssm.time_step_rank", 2**31, "time_step_rank is 2147483648, which its tensors do not fit"),
        (
            "granitehybrid",
            "attention.head_count_kv",
            [1000, 0],
            "head_count_kv is 1000, which its tensors do not",
        ),
        ("granitehybrid", "ssm.inner_size", None, "it has no granitehybrid.ssm.inner_size"),
        ("llama", "attention.head_count", 3, "not a multiple of the number of attent"),
        ("gpt2", "context_length", 2**31, "context_length is 2147483648, which its tensors do not fit"),
        ("phi3, longrope", "rope.scaling.original_context_length", "x", "original_context_length is 'x', not a number"),
        ("llama, yarn", "rope.scaling.type", "longrope", "scaled by 'longrope' are not read for architecture llama"),
        ("mistral3", "attention.temperature_length", 7, "attention.temperature_length is 7, not 16"),
        ("qwen35", "ssm.time_step_rank", 0, "its interval of attention layers or its value heads are 0"),
    ],
)
def test_settings_that_no_model_has(tmp_path: Path, case: str, key: str, value: object, message: str) -> None:
    arch, kind, config = CASES[case]
    path = write_gguf(built(kind, config), TOKENIZER, tmp_path / "model.gguf", arch, **{key: value})
    with pytest.raises(ModelError, match=message):
        opened(path)


def test_one_of_two_tensors_of_factors(tmp_path: Path) -> None:
    arch, kind, config = CASES["phi3, longrope"]
    model = built(kind, config)
    weights = {name: tensor for name, tensor in tensors(model, arch).items() if "factors_long" not in name}
    with pytest.raises(ModelError, match="it has only one of rope_factors_short"):
        read_config(read_file(write_gguf(model, TOKENIZER, tmp_path / "model.gguf", arch, weights)))


def test_a_chat_template_that_fails(tmp_path: Path) -> None:
    arch, kind, config = CASES["llama"]
    tokenizer = type(TOKENIZER)(tokenizer_object=TOKENIZER.backend_tokenizer, eos_token="</s>")
    for template in ("{{ raise_exception('no such role') }}", "{% if %}"):
        tokenizer.chat_template = template
        lm = gerund.load(write_gguf(built(kind, config), tokenizer, tmp_path / "model.gguf", arch))
        with pytest.raises(GerundError) as caught:
            lm.chat([{"role": "user", "content": "Hello."}])
        assert "\n" not in str(caught.value)
