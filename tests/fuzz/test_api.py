"""Twenty thousand calls with anything at all: each works or ends in a GerundError of one sentence."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gerund
from gerund import AttentionPlan, EncoderConfig, ModelSpec, Rerank, Sampling
from gerund.models.encoder_settings import read_adapters, read_saved
from tests.fuzz.outcome import Ledger
from tests.fuzz.values import SETTINGS, TEXTS, some, spoiled_json, value
from tests.tiny import save_tiny

PARTS = 20
CALLS = 1_000  # in each part
SEED = 20261123

SMALL = [0, 1, 2, 3]
PLAN = {
    "name": ["mask0-bidir", "causal", "inplace-back", "mask0+bidir", "inter-bidir", "extend-back", "echo", "hybrid"],
    "k": [1, 2, None],
    "k0": [1, None],
    "sink_tokens": [1, 2],
    "combine": ["sum", "mean"],
    "variant": ["paper", "released"],
}
ENCODER: dict[str, list[Any]] = {
    "attention": [AttentionPlan("causal"), AttentionPlan("inplace-bidir", 1), AttentionPlan("echo")],
    "pooling": ["mean", "last", "first", "weighted-mean", "last-mean"],
    "reroute": ["none", "1", "all"],
    "prompt": ["", "Q: "],
    "prompts": [{}, {"query": "Q: "}],
    "pool_prompt": [True, False],
    "append_eos": [True, False],
    "normalize": [True, False],
    "max_length": [None, 5, 30],
}
SAMPLING: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.0],
    "top_k": [None, 1, 5],
    "top_p": [None, 0.9],
    "typical_p": [None, 0.5],
    "seed": [None, 0, 7],
}
RERANK: dict[str, list[Any]] = {
    "samples": [1, 2],
    "beams": [1, 2],
    "every": [None, 2],
    "scorer": ["overlap", "random", None],
}
SAMPLINGS = [None, Sampling(), Sampling(temperature=1.0, seed=1)]
TEXT = ["the cat", ["a dog", "the cat sat"], ["x"]]
ENCODING: dict[str, list[Any]] = {
    "texts": TEXT,
    "prompt": [None, "Q: "],
    "normalize": [None, True],
    "batch_tokens": [None, 64],
    "show_progress": [False],
    "empty": ["error", "zeros"],
    "overflow": ["truncate", "error"],
}
LOADING: dict[str, list[Any]] = {
    "attention": ["causal", "mask0-bidir", AttentionPlan("echo")],
    "k": [1],
    "k0": [None],
    "sink_tokens": [1],
    "pooling": ["last"],
    "prompt": ["Q: "],
    "adapter": ["none"],
    "infill_adapter": ["none"],
    "scorer": ["none"],
    "dtype": ["float32", "auto"],
    "device": ["cpu"],
    "max_length": [9],
    "skips": [0, 1],
    "recurrent": ["causal"],
    "prompts": [{}, {"query": "Q: "}],
    "template": ["none", "prompteol", "kv-embedding", "Say {text} in a word:"],
    "layers": ["last", "all", "1-2"],
    "prepend": [0, 1],
    "reroute": ["none", "1", "all"],
    "transform": ["none", "truncate-8", "whitening"],
    "pool_bos": ["auto", "never"],
    "text_normalization": ["nfkc", "none"],
    "fusion": [0.0, 0.5],
    "sample": [None],
}
WRITING: dict[str, list[Any]] = {
    "n": [1, 2],
    "stop": [None, "a", ["b", "c"]],
    "logprobs": [None, 0, 2],
    "choice": [None, ["a", "b"]],
    "regex": [None, "[ab]+"],
    "schema": [None, {"type": "integer"}],
}
MESSAGES: list[Any] = [
    [{"role": "user", "content": "the cat"}],
    [{"role": "system", "content": "x"}, {"role": "user", "content": [{"type": "text", "text": "a dog"}]}],
]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two small layers."""
    folder = save_tiny(tmp_path_factory.mktemp("fuzz") / "model", num_hidden_layers=2)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class Calls:
    """Makes calls up."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.folder = folder
        self.rng = rng
        self.lm = gerund.load(folder, dtype="float32")
        self.made = [
            *[(self.construct, 5.0)],
            *[(self.spec, 3.0), (self.settings_of_a_file, 2.0), (self.with_encoder, 0.4), (self.load, 0.15)],
            *[(self.encode, 2.0), (self.encode_others, 1.0), (self.similarity, 0.7), (self.fingerprint, 0.3)],
            *[(self.generate, 0.7), (self.stream, 0.3), (self.score, 0.6), (self.infill, 0.3), (self.expand, 0.15)],
            *[(self.span, 0.5), (self.keep, 0.4), (self.save, 0.25)],
            *[(self.chat, 0.3), (self.rerank, 0.3), (self.read, 0.3), (self.fitted, 0.15), (self.rerouting, 0.15)],
        ]

    def one(self) -> tuple[str, Callable[[], Any]]:
        """Return a call, in words and to be made."""
        [maker] = self.rng.choices([made for made, _ in self.made], [weight for _, weight in self.made])
        function, arguments = maker()
        shown = ", ".join(f"{name}={item!r:.60}" for name, item in arguments.items())
        return f"{getattr(function, '__qualname__', function)}({shown})", lambda: function(**arguments)

    def construct(self) -> tuple[Any, dict[str, Any]]:
        kinds = [(AttentionPlan, PLAN), (EncoderConfig, ENCODER), (Sampling, SAMPLING), (Rerank, RERANK)]
        kind, good = self.rng.choice(kinds)
        return kind, some(self.rng, good)

    def spec(self) -> tuple[Any, dict[str, Any]]:
        good = {"model": ["default", str(self.folder)], **LOADING}
        if self.rng.random() < 0.5:
            return ModelSpec.of, some(self.rng, good)
        return ModelSpec, some(self.rng, good)

    def settings_of_a_file(self) -> tuple[Any, dict[str, Any]]:
        data = SETTINGS
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            data = spoiled_json(self.rng, data)
        text = json.dumps(data)
        if self.rng.random() < 0.2:
            place = self.rng.randrange(len(text))
            text = (
                text[:place] + self.rng.choice(["", "{", "\ud800", "[" * 200_000, '"', ",", "\0"]) + text[place + 1 :]
            )
        (self.folder / "gerund.json").write_bytes(text.encode("utf-8", "surrogatepass"))

        def read(text: str) -> None:
            del text
            try:
                read_saved(self.folder)
                read_adapters(self.folder)
            finally:
                (self.folder / "gerund.json").unlink()

        return read, {"text": text}

    def with_encoder(self) -> tuple[Any, dict[str, Any]]:
        if self.rng.random() < 0.2:
            return self.lm.with_encoder, {"encoder": value(self.rng)}
        good = {**PLAN, "k": [1, 2, 3, None]}
        plan, settings = some(self.rng, good, 0.2), some(self.rng, ENCODER, 0.1)

        def read(plan: dict[str, Any], settings: dict[str, Any]) -> None:
            other = self.lm.with_encoder(EncoderConfig(**{**settings, "attention": AttentionPlan(**plan)}))
            other.encode(["the cat", "a"])

        return read, {"plan": plan, "settings": settings}

    def load(self) -> tuple[Any, dict[str, Any]]:
        good = {"model": [self.folder, str(self.folder)], **LOADING}
        settings = {"model": self.folder, **some(self.rng, good)}
        if settings["model"] is None or (isinstance(settings["model"], str) and settings["model"] == "default"):
            settings["model"] = self.folder
        return gerund.load, settings

    def encode(self) -> tuple[Any, dict[str, Any]]:
        good = {**ENCODING, "dimensions": [None, 4], "output": ["numpy", "torch"]}
        return self.lm.encode, {"texts": self.rng.choice(TEXT), **some(self.rng, good)}

    def encode_others(self) -> tuple[Any, dict[str, Any]]:
        if self.rng.random() < 0.5:
            return self.lm.encode_tokens, {"texts": self.rng.choice(TEXT), **some(self.rng, ENCODING)}
        words = [[["EU", "rejects"]], [["a"], ["b", "c"]]]
        good = {"sentences": words, "pooling": ["mean", "first"], "shift": [True], "prompt": [None, "Q: "]}
        return self.lm.encode_words, {"sentences": words[0], **some(self.rng, good)}

    def similarity(self) -> tuple[Any, dict[str, Any]]:
        return self.lm.similarity, {"a": "the cat", "b": ["a dog"], **some(self.rng, {"a": TEXT, "b": TEXT}, 0.9)}

    def fingerprint(self) -> tuple[Any, dict[str, Any]]:
        return self.lm.fingerprint, some(self.rng, {"dimensions": [None, 4]}, 0.9)

    def generate(self) -> tuple[Any, dict[str, Any]]:
        good = {
            "prompts": TEXT,
            "max_new_tokens": [1, 2],
            "sampling": SAMPLINGS,
            "rerank": [None],
            "batch_size": [1, 16],
            **WRITING,
        }
        if self.rng.random() < 0.3:
            good["rerank"] = [Rerank(samples=2, scorer="overlap"), Rerank(samples=1, beams=2, every=1, scorer="random")]
        return self.lm.generate, {"prompts": "the", "max_new_tokens": 2, **some(self.rng, good)}

    def stream(self) -> tuple[Any, dict[str, Any]]:
        good = {"prompt": ["the", ""], "max_new_tokens": [1, 2], "sampling": SAMPLINGS, "rerank": [None]}

        def stream(**settings: Any) -> None:
            for _ in self.lm.stream(**settings):
                pass

        return stream, {"prompt": "the", "max_new_tokens": 2, **some(self.rng, good)}

    def score(self) -> tuple[Any, dict[str, Any]]:
        good = {"prefixes": [["a"]], "continuations": [[[" b", " c"]]], "scorer": ["pmi", "overlap", None, "cll"]}
        return self.lm.score, {"prefixes": ["a"], "continuations": [[" b"]], **some(self.rng, good)}

    def infill(self) -> tuple[Any, dict[str, Any]]:
        good = {
            "text": ["the [blank] sat", "a [blank] b [blank] c"],
            "blank": ["[blank]"],
            "max_tokens": [1, 2],
            "lengths": [None, [1]],
            "sampling": SAMPLINGS,
            "beams": [1, 2],
            "samples": [1, 2],
            "method": ["infill", "left-only", "blank"],
            "shots": [0, 5],
        }
        return self.lm.infill, {"text": "the [blank] sat", "max_tokens": 2, **some(self.rng, good)}

    def expand(self) -> tuple[Any, dict[str, Any]]:
        good = {
            "query": ["how to dry damp walls"],
            "count": [1, 2],
            "keep": [(), ["walls"]],
            "fraction": [0.3],
            "max_tokens": [1, 2],
            "sampling": [Sampling(temperature=1.0, seed=1)],
        }
        return self.lm.expand, {"query": "how to dry walls", "count": 1, "max_tokens": 2, **some(self.rng, good)}

    def span(self) -> tuple[Any, dict[str, Any]]:
        good = {"left": ["a"], "span": [" b"], "right": [" c"], "mode": ["infill", "causal"]}
        return self.lm.span_logprobs, {"left": "a", "span": " b", "right": " c", **some(self.rng, good)}

    def keep(self) -> tuple[Any, dict[str, Any]]:
        lm = self.lm.with_encoder(EncoderConfig(attention=AttentionPlan("causal")))

        def keep(tokens: Any, sampling: Any, **settings: Any) -> None:
            _, session = lm.encode_and_keep(**settings)
            session.generate(tokens, sampling)

        said = {"text": "a cat", "tokens": 2, "sampling": None}
        return keep, said | some(
            self.rng, {"text": TEXTS, "prompt": [None, "Q: "], "tokens": [1], "sampling": SAMPLINGS}
        )

    def chat(self) -> tuple[Any, dict[str, Any]]:
        good = {"messages": MESSAGES, "sampling": SAMPLINGS, "rerank": [None], **WRITING}
        return self.lm.chat, {"messages": MESSAGES[0], "max_new_tokens": 2, **some(self.rng, good, 0.2)}

    def rerank(self) -> tuple[Any, dict[str, Any]]:
        good = {"documents": TEXT, "top_k": [None, 1], "by": [None, "vectors", "likelihood"]}
        return self.lm.rerank, {"query": "a", "documents": ["the cat", "a dog"], **some(self.rng, good)}

    def read(self) -> tuple[Any, dict[str, Any]]:
        def read(prompt: Any, tokens: Any, **settings: Any) -> None:
            self.lm.read(prompt).generate(tokens, **settings)

        good = {"prompt": ["the cat", "", *MESSAGES, [5, 6]], "tokens": [1, 2], "sampling": SAMPLINGS}
        return read, {"prompt": "the cat", "tokens": 2, **some(self.rng, good)}

    def fitted(self) -> tuple[Any, dict[str, Any]]:
        lm = self.lm.with_encoder(EncoderConfig(transform=self.rng.choice(["whitening-4", "all-but-the-top"])))
        texts = [f"the cat and {number}" for number in range(40)]
        good = {"texts": [texts], "prompt": [None, "Q: "], "prompt_name": [None]}
        return lm.fitted, {"texts": texts, **some(self.rng, good)}

    def rerouting(self) -> tuple[Any, dict[str, Any]]:
        return self.lm.rerouting_layers, {"texts": TEXT[1], **some(self.rng, {"texts": TEXT}, 0.7)}

    def save(self) -> tuple[Any, dict[str, Any]]:
        nowhere = ["/dev/null/x", "/proc/x", "/proc/a\0b", "/proc/" + "x" * 300, "/dev/null/\ud800", self.folder]
        place = value(self.rng)
        if isinstance(place, (str, Path)) or self.rng.random() < 0.3:
            place = self.rng.choice(nowhere)  # whoever runs this may be allowed to write anywhere else
        method, more = self.rng.choice([(self.lm.save, {}), (self.lm.export, {"format": "merged"})])
        return method, {
            "folder": place,
            **more,
            **({"format": value(self.rng)} if more and self.rng.random() < 0.5 else {}),
        }


@pytest.mark.sweep(quick=0, check=3)
@pytest.mark.parametrize("part", range(PARTS))
def test_calls_with_anything_at_all(folder: Path, part: int) -> None:
    rng = random.Random(SEED + part)
    calls = Calls(folder, rng)
    ledger = Ledger()
    for _ in range(CALLS):
        ledger.note(*calls.one())
    assert not ledger.wrong, ledger.report()
    assert ledger.done["worked"] > CALLS / 20
    assert ledger.done["refused"] > CALLS / 4
