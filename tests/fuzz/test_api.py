"""Twenty thousand calls with any arguments: each works or ends in a GerundError of one sentence."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, seed
from hypothesis import strategies as st

import gerund
from gerund import AttentionPlan, EncoderConfig, ModelSpec, Rerank, Sampling
from gerund.models.saved_settings import read_adapters, read_saved
from tests.fuzz.outcome import fuzz, outcome
from tests.fuzz.values import SETTINGS, TEXTS, VALUES, good_settings, some, spoiled_json
from tests.tiny import save_tiny

PARTS = 80
CALLS = 250  # in each part
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


def call(function: Any, good: dict[str, list[Any]], **required: Any) -> st.SearchStrategy[tuple[Any, dict[str, Any]]]:
    """Return calls of a function: these arguments, or others of which some are good and up to two are anything."""
    return some(good).map(lambda settings: (function, required | settings))


class Calls:
    """Calls of everything public, as strategies."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lm = lm = gerund.load(folder, dtype="float32")
        self.causal = lm.with_encoder(EncoderConfig(attention=AttentionPlan("causal")))
        words = [[["EU", "rejects"]], [["a"], ["b", "c"]]]
        spec, texts = {"model": ["default", str(folder)], **LOADING}, [f"the cat and {number}" for number in range(40)]
        reranks = [None, Rerank(samples=2, scorer="overlap"), Rerank(samples=1, beams=2, every=1, scorer="random")]
        generation = {"max_new_tokens": [1, 2], "sampling": SAMPLINGS, "rerank": [None]}
        encoding = {**ENCODING, "dimensions": [None, 4], "output": ["numpy", "torch"]}
        span = {"left": ["a"], "span": [" b"], "right": [" c"], "mode": ["infill", "causal"]}
        scoring = {"prefixes": [["a"]], "continuations": [[[" b", " c"]]], "scorer": ["pmi", "overlap", None, "cll"]}
        infilling = {
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
        expansion = {
            "query": ["how to dry damp walls"],
            "count": [1, 2],
            "keep": [(), ["walls"]],
            "fraction": [0.3],
            "max_tokens": [1, 2],
            "sampling": [Sampling(temperature=1.0, seed=1)],
        }
        reranking = {"documents": TEXT, "top_k": [None, 1], "by": [None, "vectors", "likelihood"]}
        sessions = {"text": TEXTS, "prompt": [None, "Q: "], "tokens": [1], "sampling": SAMPLINGS}
        prefill = {"prompt": ["the cat", "", *MESSAGES, [5, 6]], "tokens": [1, 2], "sampling": SAMPLINGS}
        fitting = {"texts": [texts], "prompt": [None, "Q: "], "prompt_name": [None]}
        whitening, top = (lm.with_encoder(EncoderConfig(transform=name)) for name in ("whitening-4", "all-but-the-top"))
        # With how many of 380 calls each has.
        weighted: list[tuple[int, st.SearchStrategy[Any]]] = [
            *[(25, call(AttentionPlan, PLAN)), (25, call(EncoderConfig, ENCODER))],
            *[(25, call(Sampling, SAMPLING)), (25, call(Rerank, RERANK))],
            *[(30, call(ModelSpec.of, spec)), (30, call(ModelSpec, spec)), (40, self.settings_of_a_file())],
            *[(8, self.with_encoder()), (3, call(gerund.load, {**LOADING, "model": [folder]}, model=folder))],
            *[(30, call(lm.encode, encoding, texts=TEXT[0])), (10, call(lm.encode, encoding, texts=TEXT[1]))],
            (10, call(lm.encode_tokens, ENCODING, texts=TEXT[1])),
            (10, call(lm.encode_words, {"sentences": words, "pooling": ["mean"], "shift": [True]}, sentences=words[0])),
            (14, call(lm.similarity, {"a": TEXT, "b": TEXT}, a="the cat", b=["a dog"])),
            (6, call(lm.fingerprint, {"dimensions": [None, 4]})),
            (10, call(lm.generate, {"prompts": TEXT, **generation, **WRITING}, prompts="the", max_new_tokens=2)),
            (4, call(lm.generate, {"prompts": TEXT, **generation, "rerank": reranks}, prompts="the", max_new_tokens=2)),
            (6, call(self.stream, {"prompt": ["the", ""], **generation}, prompt="the", max_new_tokens=2)),
            (12, call(lm.score, scoring, prefixes=["a"], continuations=[[" b"]])),
            (6, call(lm.infill, infilling, text="the [blank] sat", max_tokens=2)),
            (3, call(lm.expand, expansion, query="how to dry walls", count=1, max_tokens=2)),
            (10, call(lm.span_logprobs, span, left="a", span=" b", right=" c")),
            (8, call(self.session, sessions, text="a cat", tokens=2, sampling=None)),
            (6, call(lm.chat, {"messages": MESSAGES, **generation, **WRITING}, messages=MESSAGES[0], max_new_tokens=2)),
            (6, call(lm.rerank, reranking, query="a", documents=["the cat", "a dog"])),
            (6, call(self.read, prefill, prompt="the cat", tokens=2)),
            *[(2, call(whitening.fitted, fitting, texts=texts)), (1, call(top.fitted, fitting, texts=texts))],
            *[(3, call(lm.rerouting_layers, {"texts": TEXT}, texts=TEXT[1])), (5, self.save())],
        ]
        table = [strategy for weight, strategy in weighted for _ in range(weight)]
        self.any = st.integers(0, len(table) - 1).flatmap(table.__getitem__)

    def settings_of_a_file(self) -> st.SearchStrategy[Any]:
        def read(text: str) -> None:
            (self.folder / "gerund.json").write_bytes(text.encode("utf-8", "surrogatepass"))
            try:
                read_saved(self.folder)
                read_adapters(self.folder)
            finally:
                (self.folder / "gerund.json").unlink()

        return st.randoms(use_true_random=False).map(lambda rng: (read, {"text": spoiled_settings(rng)}))

    def with_encoder(self) -> st.SearchStrategy[Any]:
        def encode(plan: dict[str, Any], settings: dict[str, Any]) -> None:
            other = self.lm.with_encoder(EncoderConfig(**{**settings, "attention": AttentionPlan(**plan)}))
            other.encode(["the cat", "a"])

        plans, settings = {**PLAN, "k": [1, 2, 3, None]}, good_settings(ENCODER)
        good = st.fixed_dictionaries({"plan": good_settings(plans), "settings": settings})
        wrong = st.fixed_dictionaries({"plan": some(plans), "settings": some(ENCODER)})
        return st.one_of(
            good.map(lambda arguments: (encode, arguments)),
            wrong.map(lambda arguments: (encode, arguments)),
            VALUES.map(lambda encoder: (self.lm.with_encoder, {"encoder": encoder})),
        )

    def stream(self, **settings: Any) -> None:
        for _ in self.lm.stream(**settings):
            pass

    def session(self, tokens: Any, sampling: Any, **settings: Any) -> None:
        _, session = self.causal.encode_and_prefill(**settings)
        session.generate(tokens, sampling)

    def read(self, prompt: Any, tokens: Any, **settings: Any) -> None:
        self.lm.prefill(prompt).generate(tokens, **settings)

    def save(self) -> st.SearchStrategy[Any]:
        # Where no process may write: another path might be written to.
        nowhere = ["/dev/null/x", "/proc/x", "/proc/a\0b", "/proc/" + "x" * 300, "/dev/null/\ud800", self.folder]
        place = st.sampled_from(nowhere) | VALUES.filter(lambda value: not isinstance(value, (str, Path)))
        return st.one_of(
            place.map(lambda folder: (self.lm.save, {"folder": folder})),
            st.tuples(place, st.just("merged") | VALUES).map(
                lambda drawn: (self.lm.export, {"folder": drawn[0], "format": drawn[1]})
            ),
        )


def spoiled_settings(rng: random.Random) -> str:
    """Return the text of a settings file with something wrong in it."""
    data = SETTINGS
    for _ in range(rng.choice([1, 1, 2, 3])):
        data = spoiled_json(rng, data)
    text = json.dumps(data)
    if rng.random() < 0.2:
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice(["", "{", "\ud800", "[" * 200_000, '"', ",", "\0"]) + text[place + 1 :]
    return text


@pytest.mark.sweep(quick=0, check=1)
@pytest.mark.parametrize("part", range(PARTS))
def test_calls_with_any_arguments(folder: Path, part: int) -> None:
    counts: Counter[str] = Counter()

    @seed(SEED + part)
    @fuzz(CALLS)
    @given(Calls(folder).any)
    def run(call: tuple[Any, dict[str, Any]]) -> None:
        function, arguments = call
        if function == gerund.load and arguments["model"] in (None, "default"):
            arguments["model"] = folder
        counts[outcome(lambda: function(**arguments))] += 1

    run()
    assert counts["worked"] > CALLS / 20
    assert counts["refused"] > CALLS / 4
