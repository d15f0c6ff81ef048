"""What is given is checked by its kind first, and whatever is quoted, the message is one line that fits."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import gerund
from gerund import AttentionPlan, EncoderConfig, ModelSpec, Rerank, Sampling
from gerund.checks import flag, is_listing, one_of, place, read_json, read_sample
from gerund.errors import ConfigError, DataError, GerundError
from tests.fuzz.values import frames


@pytest.fixture(scope="module")
def lm(tiny_folder: Path) -> gerund.LanguageModel:
    return gerund.load(tiny_folder, dtype="float32")


def refusal(call, *arguments, kind=GerundError, **options) -> str:
    with pytest.raises(kind) as caught:
        call(*arguments, **options)
    message = str(caught.value)
    assert message.isprintable()
    assert 0 < len(message) <= 300
    return message


class TestMessages:
    def test_one_line_whatever_is_quoted(self) -> None:
        assert str(ConfigError("a\n  b\r\nc\u2028d")) == "a b c d"
        assert str(ConfigError("a\x1b[31m\0\ud800")) == "a\\x1b[31m\\x00\\ud800"

    def test_spaces_and_letters_stay(self) -> None:
        assert str(DataError("a  b: 日本語 é 🙂")) == "a  b: 日本語 é 🙂"

    @pytest.mark.parametrize("length", [301, 5_000, 10_000_000])
    def test_the_middle_goes_first(self, length: int) -> None:
        message = str(GerundError("begin" + "x" * length + "end"))
        assert len(message) == 300
        assert message.startswith("beginx")
        assert message.endswith("xend")
        assert " ... " in message

    def test_through_pickle(self) -> None:
        again = pickle.loads(pickle.dumps(ConfigError("a\nb")))
        assert (type(again), str(again)) == (ConfigError, "a b")


class TestPlaces:
    @pytest.mark.parametrize("given", ["a/b", Path("a/b")])
    def test_a_path(self, given) -> None:
        assert place("adapter", given) == Path("a/b")

    @pytest.mark.parametrize("given", [5, b"a/b", None, ["a"], np.array("a"), torch.tensor(3), object()])
    def test_no_path(self, given) -> None:
        assert refusal(place, "adapter", given).startswith("adapter is a path, not ")

    @pytest.mark.parametrize(
        ("given", "said"),
        [
            ("a\0b", "it holds a NUL character"),
            ("a\ud800b", "a lone surrogate at character 1"),
            ("a/" + "x" * 256, "has 256 bytes where file systems allow 255"),
            ("é" * 128, "has 256 bytes where file systems allow 255"),
            ("x/" * 3000, "has 6000 bytes where file systems allow 4095"),
        ],
    )
    def test_a_path_that_cannot_be(self, given: str, said: str) -> None:
        message = refusal(place, "adapter", given)
        assert message.startswith("adapter is no path: ")
        assert said in message

    def test_the_longest_name(self) -> None:
        place("adapter", "x" * 255)

    def test_both_separators_of_windows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gerund.checks.os.sep", "\\")
        monkeypatch.setattr("gerund.checks.os.altsep", "/")
        place("adapter", "C:/" + "a/" * 200 + "b\\" * 200)


class TestKinds:
    def test_one_of(self) -> None:
        one_of("pooling", "mean", ["mean", "last"])
        for given in ("max", 5, None, ["mean"], np.array(["mean"]), {}):
            assert refusal(one_of, "pooling", given, ["mean", "last"]).endswith("valid are: mean, last")

    def test_flags(self) -> None:
        assert [flag("x", given) for given in (True, False, 1, 0, np.bool_(True))] == [True, False, True, False, True]
        for given in ("yes", None, [], np.array([1, 2]), 0.5, *frames()):
            assert refusal(flag, "x", given).startswith("x is True or False, not ")

    def test_what_holds_others_in_a_row(self) -> None:
        assert all(map(is_listing, ([], (), {"a"}, range(2), iter("a"), np.array(["a"]))))
        assert not any(
            map(is_listing, ("a", b"a", {}, 5, None, np.array("a"), np.array([["a"]]), torch.tensor(3), list))
        )


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b'\xef\xbb\xbf["a"]\r\n')
    assert read_json(tmp_path / "x") == ["a"]
    assert read_sample(tmp_path / "x") == ['["a"]']


@pytest.mark.parametrize("text", ["{", "[" * 200_000, "\0", ""])
def test_json_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    assert "x.json is not valid JSON: " in refusal(read_json, tmp_path / "x.json")


def test_json_that_is_no_utf8_or_not_there(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'"\xff"')
    assert "x.json is not valid JSON: " in refusal(read_json, tmp_path / "x.json")
    assert refusal(read_json, tmp_path / "y.json").endswith("y.json cannot be read: No such file or directory")


SETTINGS = [
    5,
    2**63,
    {},
    [],
    np.array(3),
    np.array(["a"]),
    np.zeros((2, 2)),
    torch.zeros(2),
    b"bytes",
    object(),
    *frames(),
]


@pytest.mark.parametrize("given", SETTINGS, ids=lambda given: type(given).__name__)
@pytest.mark.parametrize(
    "name", ["adapter", "infill_adapter", "scorer", "dtype", "device", "pooling", "prompt", "attention"]
)
def test_settings_that_are_texts(tiny_folder: Path, name: str, given: object) -> None:
    if name == "attention" and isinstance(given, dict):
        return  # a plan with all that it is left to itself
    refusal(gerund.load, tiny_folder, **{name: given})


@pytest.mark.parametrize(
    "given", [0.5, "3", {}, [], np.array(["a"]), np.zeros((2, 2)), torch.zeros(2), b"3", *frames()], ids=repr
)
@pytest.mark.parametrize("name", ["k", "k0", "sink_tokens", "max_length"])
def test_settings_that_are_numbers(tiny_folder: Path, name: str, given: object) -> None:
    refusal(gerund.load, tiny_folder, **{name: given})


@pytest.mark.parametrize("given", [10**30, 2**63, -1])
@pytest.mark.parametrize("name", ["k", "sink_tokens"])
def test_numbers_that_no_model_has(tiny_folder: Path, name: str, given: int) -> None:
    refusal(gerund.load, tiny_folder, **{name: given})
    refusal(AttentionPlan, "mask0-bidir", **{name: given})


def test_numbers_of_numpy_are_numbers() -> None:
    plan = AttentionPlan("mask0-bidir", k=np.int64(3), sink_tokens=np.uint8(2))
    assert plan == AttentionPlan("mask0-bidir", k=3, sink_tokens=2)
    assert (type(plan.k), type(plan.sink_tokens)) == (int, int)
    assert ModelSpec(k=np.int32(3)) == ModelSpec(k=3)


@pytest.mark.parametrize("given", SETTINGS, ids=lambda given: type(given).__name__)
@pytest.mark.parametrize(
    ("kind", "name"),
    [(AttentionPlan, "name"), (AttentionPlan, "combine"), (AttentionPlan, "variant"), (EncoderConfig, "pooling"),
     (EncoderConfig, "prompts"), (EncoderConfig, "normalize"), (Sampling, "top_p"), (Rerank, "every")],
)  # fmt: skip
def test_settings_of_other_kinds(kind: type, name: str, given: object) -> None:
    good = (
        (name, given) in [("prompts", {}), ("top_p", 5), ("every", 5), ("every", 2**63)]
        if isinstance(given, (int, dict))
        else False
    )
    if not good:
        refusal(kind, **{name: given})


TEXTS = [
    5,
    None,
    b"text",
    {},
    np.array("text"),
    np.array([["a"]]),
    np.array([1, 2]),
    torch.zeros(2),
    [None],
    [["a"]],
    *frames(),
]


@pytest.mark.parametrize("given", TEXTS, ids=lambda given: type(given).__name__)
def test_texts_that_are_none(lm: gerund.LanguageModel, given: object) -> None:
    if type(given).__name__ == "Series" and all(isinstance(text, str) for text in given):
        assert len(lm.encode(given)) == len(given)
        return
    for verb in (lm.encode, lm.encode_tokens):
        refusal(verb, given)
    if type(given).__name__ in ("ndarray", "Series") and str(getattr(given, "dtype", "")) == "int64":
        assert len(lm.generate(given, 2)) == 1  # the token ids of one prompt
    else:
        refusal(lm.generate, given)
    if not (isinstance(given, list) and given[0]):  # words
        refusal(lm.encode_words, given)
        refusal(lm.score, ["a"], given)
    refusal(lm.score, given, [[" b"]])


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        ("encode", {"output": np.array(["numpy"])}),
        ("encode", {"normalize": np.array([1, 2])}),
        ("encode", {"show_progress": np.array([1, 2])}),
        ("encode", {"empty": np.array(["zeros"])}),
        ("encode", {"overflow": ["error"]}),
        ("encode", {"dimensions": np.array([1, 2])}),
        ("encode_tokens", {"normalize": "yes"}),
        ("fingerprint", {"dimensions": "\ud800"}),
        ("fingerprint", {"dimensions": np.array([1, 2])}),
        ("infill", {"method": np.array(["infill"])}),
        ("export", {"folder": 5, "format": "merged"}),
        ("export", {"folder": "/dev/null/x", "format": np.array(["merged"])}),
        ("save", {"folder": b"/dev/null/x"}),
        ("save", {"folder": "/dev/null/" + "x" * 256}),
        ("score", {"prefixes": ["a"], "continuations": [[" b"]], "scorer": np.array([])}),
        ("score", {"prefixes": ["a"], "continuations": [[" b"]], "scorer": "x" * 300}),
        ("with_encoder", {"encoder": {"pooling": "last"}}),
    ],
    ids=lambda given: next(iter(given)) if isinstance(given, dict) else given,
)
def test_arguments_of_other_kinds(lm: gerund.LanguageModel, verb: str, options: dict[str, object]) -> None:
    texts = {"infill": ["a [blank] b"]}.get(verb, ["a cat"] if verb.startswith("encode") else [])
    refusal(getattr(lm, verb), *texts, **options)
