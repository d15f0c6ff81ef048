"""Values that belong nowhere, and some that belong, for a generator of random numbers to choose from."""

import random
from collections.abc import Iterator
from datetime import date
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gerund import PLAN_NAMES, AttentionPlan, EncoderConfig, Rerank, Sampling

NUMBERS: list[Any] = [
    0,
    1,
    2,
    3,
    7,
    -1,
    64,
    65,
    2**31,
    2**63,
    10**30,
    -(2**63),
    0.5,
    1.0,
    -0.5,
    1e308,
    1e-320,
    float("nan"),
    float("inf"),
    True,
    False,
    np.int64(2),
    np.float32(0.5),
    np.uint8(3),
    np.bool_(True),
    np.float64("nan"),
    Decimal("0.5"),
    Fraction(1, 3),
    1 + 2j,
]
TEXTS: list[Any] = [
    "",
    " ",
    "\n",
    "a",
    "the cat",
    "The cat sat on the mat.",
    "auto",
    "none",
    "default",
    "mean",
    "last",
    "query",
    "a\0b",
    "\ud800",
    "x\udce9y",
    "é" * 200,
    "x" * 300,
    "x/" * 3000,
    "the " * 200,
    "[blank]",
    "a [blank] b",
    "<s>",
    "</s>",
    "\u2028",
    "\x1b[31m",
    "../x",
    "/nosuch/x",
    "~",
    "cpu",
    "cuda:99",
    "float32",
    "pmi",
    "overlap",
    "null",
    "{}",
    "日本語",
    "🙂",
    "\r\n",
    np.str_("the cat"),
    *PLAN_NAMES,
]
PLACES: list[Any] = [
    Path("/nosuch/x"),
    Path("x" * 300),
    Path("a\0b"),
    Path("/"),
    Path("/dev/null/x"),
    Path("/proc/x"),
    b"/tmp/x",
    "/dev/null",
    "/dev/full",
    "y" * 5000,
    Path("/" + "z/" * 3000),
    "/etc/passwd",
    Path(),
]

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
    """Return things of other kinds, fresh ones, since some are used up by being read."""
    return [
        None,
        None,
        [],
        (),
        {},
        set(),
        [1],
        [None],
        ["a", 5],
        ["the cat", "a dog"],
        ["a", ""],
        [[]],
        [["a"]],
        [["a", "b"], ["c"]],
        {"a": 1},
        {"query": "Q: "},
        {1: 2},
        {"the cat"},
        (text for text in ("a", "b")),
        range(3),
        b"bytes",
        bytearray(b"x"),
        np.array(3),
        np.array("x"),
        np.array([1, 2]),
        np.array(["a", "b"]),
        np.array([["a"]]),
        np.array([]),
        np.zeros((2, 2)),
        np.zeros((2, 32), np.float32),
        np.full((1, 32), np.nan),
        np.array([None]),
        np.array(0.5),
        torch.tensor(3),
        torch.tensor([1.0, 2.0]),
        torch.zeros(2, 32),
        torch.float32,
        torch.device("cpu"),
        Strange(),
        [Strange()],
        object,
        int,
        len,
        date(2020, 1, 1),
        slice(1),
        ...,
        NotImplemented,
        ValueError("x"),
        *frames(),
        AttentionPlan(),
        EncoderConfig(),
        Sampling(temperature=1.0),
        Rerank(samples=2),
    ]


def frames() -> Iterator[Any]:
    """Yield data frames and columns of them, where pandas is there."""
    try:
        import pandas
    except ImportError:
        return
    frame = pandas.DataFrame({"text": ["the cat", "a dog"], "n": [1, 2]})
    yield from (frame, frame["text"], frame["n"], pandas.NA)


def value(rng: random.Random) -> Any:
    """Return something, of whatever kind."""
    kind = rng.random()
    if kind < 0.3:
        return rng.choice(NUMBERS)
    if kind < 0.6:
        return rng.choice(TEXTS)
    if kind < 0.65:
        return rng.choice(PLACES)
    return rng.choice(others())


def some(rng: random.Random, good: dict[str, list[Any]], spoiled: float = 0.6) -> dict[str, Any]:
    """Return settings of which some are left out, most are good and one or two are anything.

    Args:
        rng: chooses.
        good: for each setting values that are good by themselves.
        spoiled: how often anything is wrong at all.
    """
    settings = {name: rng.choice(values) for name, values in good.items() if rng.random() < 0.4}
    if rng.random() < spoiled:
        for name in rng.sample(sorted(good), k=min(len(good), rng.choice([1, 1, 2]))):
            settings[name] = value(rng)
    return settings


def spoiled_json(rng: random.Random, data: Any) -> Any:
    """Return JSON data with something in it changed, taken away or added."""
    if isinstance(data, dict) and data and rng.random() < 0.85:
        copy = dict(data)
        key = rng.choice(sorted(copy))
        action = rng.random()
        if action < 0.1:
            del copy[key]
        elif action < 0.2:
            copy[rng.choice(["x", "", "encoder", "name", "\ud800"])] = leaf(rng)
        else:
            copy[key] = spoiled_json(rng, copy[key])
        return copy
    return leaf(rng)


def leaf(rng: random.Random) -> Any:
    """Return a value that JSON can hold."""
    return rng.choice(
        [
            None,
            True,
            False,
            0,
            -1,
            1,
            3,
            2**63,
            10**30,
            1e400,
            float("nan"),
            0.5,
            "",
            "x",
            "a\0b",
            "x" * 5000,
            "\ud800",
            "mean",
            "../x",
            "/etc",
            [],
            [1],
            {},
            {"a": 1},
            [[]],
            "bidir",
            "adapter",
            "y/" * 3000,
        ]
    )
