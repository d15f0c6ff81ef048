"""An engine, a server and re-ranking without torch give what they give with it."""

import json
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gerund
from gerund import Engine, EngineConfig, ModelSpec, Sampling
from gerund.inference.generate import packed_decoder
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.likelihood import sequence_logprobs
from gerund.inference.tokens import split_pairs
from gerund.light_entry import light_model
from gerund.light_model import LightModel
from gerund.models.kinds import packed_network
from gerund.packed.network import KeyValues
from gerund.scoring import packed_document_reader, query_likelihood
from gerund.scoring.query_likelihood import MEASURES, QueryPrompt
from tests.packed.test_light_encoder import TEXTS

DOCUMENTS = ["a dog barked in the garden", "trains run on rails", "the garden of the cat, " * 3 + "the end"]
QUERY = "a dog in the garden"
# Serves a file where torch cannot be imported, asks each route, and prints the answers.
SERVED = """
import json, sys, threading
sys.modules.update(dict.fromkeys(("torch", "transformers", "peft", "accelerate")))
import httpx
from gerund import ModelSpec
from gerund.server.config import ServerConfig
from gerund.server.connections import address_of, listen
from gerund.server.running import make_server

listening, ready = listen("127.0.0.1", 0), threading.Event()
spec = ModelSpec.of(sys.argv[1], device="cpu", runtime="packed")
settings = ServerConfig(name=("tiny",), slots=2, log="none")
server = make_server(spec, settings, [], lambda _: ready.set())
thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
thread.start()
assert ready.wait(60), server.failure
with httpx.Client(base_url=address_of(listening), timeout=60) as client:
    for route, body in json.loads(sys.argv[2]):
        answer = client.get(route) if body is None else client.post(route, json=body)
        print(json.dumps([answer.status_code, answer.text]))
server.should_exit = True
thread.join(30)
server.service.close()
"""


@pytest.fixture(scope="module")
def light(file: Path) -> LightModel:
    found = light_model(ModelSpec.of(file, runtime="packed"))
    assert found is not None
    return found


@pytest.fixture(scope="module")
def lm(file: Path) -> gerund.LanguageModel:
    return gerund.load(file, runtime="packed")


def asked(lm: Any) -> list[Any]:
    """Return everything that an engine answers to requests that come together."""
    prompts = ["the cat", "once upon a time there was a dog", "x", "once upon a time there was a cat " * 8, ""]
    options: list[Any] = [
        (None, {}),
        (Sampling(temperature=1.0, seed=5), {"n": 2}),
        (Sampling(frequency_penalty=0.5, repetition_penalty=1.3), {"logprobs": 2}),
        (None, {"stop": ["e"]}),
        (Sampling(temperature=0.8, top_p=0.9, seed=2), {}),
    ]
    settings = [GenerationConfig.of(5 + 7 * number, *own) for number, own in enumerate(options)]
    with Engine(lm, EngineConfig(slots=3)) as engine:
        requests = [(prompt, own) for _ in range(2) for prompt, own in zip(prompts, settings, strict=True)]
        written = [engine.submit_generate(*request) for request in requests]
        vectors = engine.submit_encode(TEXTS).result(60).vectors
        called = engine.submit_call(lambda: lm.encode(TEXTS[0]), tokens=4).result(60)
        found = [one for future in written for one in future.result(60)]
        assert engine.state().tokens_reused > 0
        assert engine.state().guarantee != "none"
    np.testing.assert_allclose(vectors[0], called, atol=1e-5)
    return [[(one.text, one.token_ids, one.finished, one.stop, one.usage) for one in found], vectors]


def test_an_engine_answers_as_with_torch(light: LightModel, lm: gerund.LanguageModel):
    (own, own_vectors), (other, other_vectors) = asked(light), asked(lm)
    assert own == other
    np.testing.assert_allclose(own_vectors, other_vectors, atol=1e-5)
    assert own[: len(own) // 2] == own[len(own) // 2 :], "the second time, prompts are found in the cache"


def test_a_text_in_an_engine_is_that_of_generate(light: LightModel):
    prompts = ["the cat", "once upon a time there was a dog", "x " * 60]
    with Engine(light, EngineConfig(slots=2)) as engine:
        futures = [engine.submit_generate(prompt, GenerationConfig(80)) for prompt in prompts]  # caches grow
        found = [future.result(60)[0].token_ids for future in futures]
    # In 8 bits one row is rounded as several are.
    assert found == [light.generate(prompt, 80)[0].token_ids for prompt in prompts]


def test_a_cancelled_request_leaves_the_others_as_they_are(light: LightModel):
    began = threading.Event()
    with Engine(light, EngineConfig(slots=2)) as engine:
        long = engine.submit_generate("the dog", GenerationConfig(400, ignore_eos=True), on_text=lambda _: began.set())
        kept = engine.submit_generate("the cat", GenerationConfig(40))
        assert began.wait(30)
        long.cancel()
        assert kept.result(60)[0].text == light.generate("the cat", 40)[0].text
        with pytest.raises(CancelledError):
            long.result(30)
        assert engine.submit_generate("the cat", GenerationConfig(40)).result(60)[0].text == kept.result()[0].text


def test_what_a_trial_found_is_kept(light: LightModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packed_decoder, "describe_files", lambda files: "some files")
    decoding, tries = light.decoding, []
    real = packed_decoder.PackedDecoding._try
    monkeypatch.setattr(packed_decoder.PackedDecoding, "_try", lambda self, *own: tries.append(own) or real(self, *own))
    for _ in range(2):
        packed_decoder._tried.clear()
        found = decoding.check(2, 100)
    assert tries == [(2, 100)]
    assert (found.guarantee, found.recalls) == ("bits of generate", True)
    [kept] = [path for path in tmp_path.rglob("*") if path.is_file()]
    kept.write_text("bits of generate|9|yes")
    packed_decoder._tried.clear()
    assert decoding.check(2, 100) == found
    assert len(tries) == 2


def test_a_row_that_depends_on_others_is_noticed(light: LightModel, monkeypatch: pytest.MonkeyPatch):
    real = packed_decoder.PackedSlots.step
    monkeypatch.setattr(
        packed_decoder.PackedSlots, "step", lambda self, tokens: real(self, tokens) * (1 + 1e-6 * len(tokens))
    )
    packed_decoder._tried.clear()
    assert light.decoding.check(3, 64).guarantee == "none"
    packed_decoder._tried.clear()


@pytest.mark.parametrize("measure", list(MEASURES))
def test_likelihoods_of_a_query_are_those_of_whole_texts(
    light: LightModel, lm: gerund.LanguageModel, measure: str, monkeypatch: pytest.MonkeyPatch
):
    prompt, model, tokenizer = QueryPrompt.of(lm.tokenizer), lm.model, lm.tokenizer

    def logprobs(document: str | None) -> np.ndarray:
        [split] = split_pairs(tokenizer, [(prompt.before(document), f" {QUERY}")], None)
        [found] = sequence_logprobs(model, tokenizer, [(split.ids, split.split)])
        return found.astype(np.float64)

    expected = [MEASURES[measure](logprobs(text), logprobs(None)).mean() for text in DOCUMENTS]
    rounded = light.rerank(QUERY, DOCUMENTS, by=measure)
    assert rounded.scores == pytest.approx([expected[index] for index in rounded.indices], abs=0.02)
    assert light.rerank(QUERY, DOCUMENTS, by=measure) == rounded
    query_likelihood.forget(light.model)
    monkeypatch.setattr(packed_document_reader, "_BLOCK", 1)  # every number has its scale: nothing is rounded
    for one in (light, lm, light):  # the third time documents are kept
        found = one.rerank(QUERY, DOCUMENTS, by=measure)
        assert found.scores == pytest.approx([expected[index] for index in found.indices], abs=1e-3)
    query_likelihood.forget(light.model)
    monkeypatch.setattr(query_likelihood, "KEPT_PACKED_BYTES", 0)
    alone = [light.rerank(QUERY, [text], by=measure).scores[0] for text in DOCUMENTS]
    assert alone == pytest.approx(expected, abs=1e-3)
    query_likelihood.forget(light.model)


def test_a_cache_in_eight_bits_is_off_by_half_a_step_at_most(light: LightModel):
    shape = packed_network(light.model).shape
    cache, restored = (KeyValues(shape, 1, 9) for _ in range(2))
    numbers = np.random.default_rng(0)
    for array in (*cache.keys, *cache.values):
        array[:, :, 1:] = numbers.standard_normal(array[:, :, 1:].shape)  # the first token's are zeros
        array[:, :, 2] *= 1e-30
        array[:, :, 3] *= 1e30
    read = packed_document_reader.EightBitCache.of(cache, 7, np.zeros(4, np.float32))
    assert 4 * read.codes.nbytes == sum(array[:, :, :7].nbytes for array in (*cache.keys, *cache.values))
    read.restore(restored)
    for array, other in zip((*cache.keys, *cache.values), (*restored.keys, *restored.values), strict=True):
        step = np.abs(array[:, :, :7]).max(-1, keepdims=True) / 127
        assert (np.abs(array - other)[:, :, :7] <= step * 0.5001).all()
        assert not other[:, :, 7:].any()


@pytest.mark.parametrize("measure", [None, "vectors", "maxsim"])
def test_ranks_are_those_with_torch(light: LightModel, lm: gerund.LanguageModel, measure: Any):
    own, other = (model.rerank(QUERY, DOCUMENTS, by=measure, scores=[1, 3, 2]) for model in (light, lm))
    assert (own.indices, own.by) == (other.indices, other.by)
    # Documents that were read packed are kept in 8 bits.
    assert own.scores == pytest.approx(other.scores, abs=1e-3 if measure else 0.02)
    assert light.default_measure() == lm.default_measure()


def served(path: Path, requests: list[tuple[str, Any]]) -> tuple[list[Any], str]:
    """Return what a server without torch answers, and its messages."""
    done = subprocess.run(
        [sys.executable, "-c", SERVED, str(path), json.dumps(requests)], capture_output=True, text=True, check=False
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")], done.stderr


def test_a_server_without_torch(light: LightModel):
    light.generate("the cat", 2)  # its graph and tokenizer are in the cache now, which transformers has made
    pytest.importorskip("fastapi")
    turn = [{"role": "user", "content": "the cat"}]
    greedy = {"max_tokens": 6, "temperature": 0}
    answers, said = served(
        light.path,
        [
            ("/v1/models", None),
            ("/v1/chat/completions", {"messages": turn, **greedy}),
            ("/v1/chat/completions", {"messages": turn, **greedy, "stream": True}),
            ("/v1/completions", {"prompt": "the cat", **greedy}),
            ("/v1/responses", {"input": "the cat", "max_output_tokens": 6, "temperature": 0}),
            ("/api/chat", {"messages": turn, "options": {"num_predict": 6, "temperature": 0}, "stream": False}),
            ("/v1/embeddings", {"input": TEXTS}),
            ("/v1/embeddings", {"input": TEXTS[:1], "multi": True}),
            ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS}),
            ("/v1/rerank", {"query": QUERY, "documents": DOCUMENTS, "by": "vectors"}),
            ("/v1/score", {"text_1": "a cat", "text_2": ["a dog"]}),
            ("/tokenize", {"prompt": "the cat"}),
            ("/detokenize", {"tokens": [5, 6]}),
            ("/api/show", {"model": "tiny"}),
            ("/api/tags", None),
            ("/v1/playground", None),
            ("/health", None),
            ("/metrics", None),
            ("/infill", {"text": "the [blank] sat"}),
        ],
    )
    *good, (status, refused) = answers
    assert [status for status, _ in good] == [200] * 18, [text for code, text in good if code != 200]
    chat, streamed, text = (good[number][1] for number in (1, 2, 3))
    expected = light.chat(turn, 6)[0].text
    assert json.loads(chat)["choices"][0]["message"]["content"] == expected
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert (
        "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]) == expected
    )
    assert json.loads(text)["choices"][0]["text"] == light.generate("the cat", 6)[0].text
    [entry] = json.loads(good[14][1])["models"]
    assert entry["size"] == light.path.stat().st_size
    assert (entry["details"]["format"], entry["details"]["quantization_level"]) == ("gguf", "Q8_0")
    vectors = [item["embedding"] for item in json.loads(good[6][1])["data"]]
    np.testing.assert_allclose(vectors, light.encode(TEXTS), atol=1e-5)
    ranking, results = light.rerank(QUERY, DOCUMENTS), json.loads(good[8][1])["results"]
    assert [item["index"] for item in results] == ranking.indices
    assert [item["relevance_score"] for item in results] == pytest.approx(ranking.scores, abs=1e-5)
    assert status < 500
    assert "this needs torch and transformers" in refused
    assert "Traceback" not in said


def test_a_short_beginning_that_prompts_share_is_read_once(light: LightModel):
    prompts = [[*range(5, 16), *range(start, start + 20)] for start in (40, 70)]
    settings = GenerationConfig(max_new_tokens=6)
    with Engine(light, EngineConfig(slots=2)) as engine:
        texts = [engine.submit_generate(prompt, settings).result()[0].text for prompt in prompts]
        assert engine.state().tokens_reused == 8
    assert texts == [light.generate(prompt, 6)[0].text for prompt in prompts]
