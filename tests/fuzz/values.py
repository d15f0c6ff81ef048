"""Hypothesis strategies: values of any kind, settings of which some are wrong, and spoiled JSON."""

import operator
import random
from collections.abc import Iterator, Mapping
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from gerund import PLAN_NAMES, AttentionPlan, EncoderConfig, Rerank, Sampling

NUMBERS: list[Any] = [
    0, 1, 2, 3, 7, -1, 64, 65, 2**31, 2**63, 10**30, -(2**63), 0.5, 1.0, -0.5, 1e308, 1e-320, float("nan"),
    float("inf"), True, False, np.int64(2), np.float32(0.5), np.uint8(3), np.bool_(True), np.float64("nan"),
    Decimal("0.5"), Fraction(1, 3), 1 + 2j,
]  # fmt: skip
TEXTS: list[Any] = [
    "", " ", "\n", "a", "the cat", "The cat sat on the mat.", "auto", "none", "default", "mean", "last", "query",
    "a\0b", "\ud800", "x\udce9y", "é" * 200, "x" * 300, "x/" * 3000, "the " * 200, "[blank]", "a [blank] b", "<s>",
    "</s>", "\u2028", "\x1b[31m", "../x", "/nosuch/x", "~", "cpu", "cuda:99", "float32", "pmi", "overlap", "null", "{}",
    "日本語", "🙂", "\r\n", np.str_("the cat"), *PLAN_NAMES,
]  # fmt: skip
PLACES: list[Any] = [
    Path("/nosuch/x"), Path("x" * 300), Path("a\0b"), Path("/"), Path("/dev/null/x"), Path("/proc/x"), b"/tmp/x",
    "/dev/null", "/dev/full", "y" * 5000, Path("/" + "z/" * 3000), "/etc/passwd", Path(),
]  # fmt: skip
LEAVES: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**63, 10**30, 1e400, float("nan"), 0.5, "", "x", "a\0b", "x" * 5000, "\ud800",
    "mean", "../x", "/etc", [], [1], {}, {"a": 1}, [[]], "bidir", "adapter", "y/" * 3000,
]  # fmt: skip

SETTINGS = {
    "format": 1,
    "encoder": {**EncoderConfig(prompts={"query": "Q: "}).to_dict(), "max_length": 9},
    "adapters": {"infill": None, "score": "adapter"},
    "fingerprint": "0123456789abcdef",
}


class Strange:
    """An object that is of no use and says so at length."""

    def __repr__(self) -> str:
        return "strange\nand long " * 100


def others() -> list[Any]:
    """Return values of other kinds, fresh ones, since some are used up by being read."""
    return [
        None, None, [], (), {}, set(), [1], [None], ["a", 5], ["the cat", "a dog"], ["a", ""], [[]], [["a"]],
        [["a", "b"], ["c"]], {"a": 1}, {"query": "Q: "}, {1: 2}, {"the cat"}, (text for text in ("a", "b")), range(3),
        b"bytes", bytearray(b"x"), np.array(3), np.array("x"), np.array([1, 2]), np.array(["a", "b"]),
        np.array([["a"]]), np.array([]), np.zeros((2, 2)), np.zeros((2, 32), np.float32), np.full((1, 32), np.nan),
        np.array([None]), np.array(0.5), torch.tensor(3), torch.tensor([1.0, 2.0]), torch.zeros(2, 32), torch.float32,
        torch.device("cpu"), Strange(), [Strange()], object, int, len, date(2020, 1, 1), slice(1), ..., NotImplemented,
        ValueError("x"), *frames(), AttentionPlan(), EncoderConfig(), Sampling(temperature=1.0), Rerank(samples=2),
    ]  # fmt: skip


def frames() -> Iterator[Any]:
    """Yield data frames and columns of them, where pandas is there."""
    try:
        import pandas
    except ImportError:
        return
    frame = pandas.DataFrame({"text": ["the cat", "a dog"], "n": [1, 2]})
    yield from (frame, frame["text"], frame["n"], pandas.NA)


# Anything at all: numbers and texts more often than the rest.
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.integers() | st.floats(),
    st.sampled_from(TEXTS),
    st.text(st.characters(exclude_characters="/"), max_size=20),  # with it, a text could name a model of the hub
    st.sampled_from(PLACES),
    st.builds(others).flatmap(st.sampled_from),
    st.builds(others).flatmap(st.sampled_from),
)


def good_settings(good: Mapping[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Return some of the settings, each with one of its good values."""
    return st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in good.items()})


def some(good: Mapping[str, list[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Return some of the settings, of which up to two are anything."""
    wrong = st.dictionaries(st.sampled_from(sorted(good)), VALUES, max_size=2)
    return st.builds(operator.or_, good_settings(good), wrong)


def spoiled_json(rng: random.Random, data: Any) -> Any:
    """Return JSON data with something in it changed, taken away or added."""
    if isinstance(data, dict) and data and rng.random() < 0.85:
        copy = dict(data)
        key = rng.choice(sorted(copy))
        action = rng.random()
        if action < 0.1:
            del copy[key]
        elif action < 0.2:
            copy[rng.choice(["x", "", "encoder", "name", "\ud800"])] = rng.choice(LEAVES)
        else:
            copy[key] = spoiled_json(rng, copy[key])
        return copy
    return rng.choice(LEAVES)
