"""Each route against the library's own answer."""

import base64
import codecs
import json
from typing import Any

import numpy as np
import pytest

import gerund
from gerund.inference.generate.prompts import prompt_text
from gerund.server.config import ServerConfig
from gerund.server.routes import generation as infilling
from gerund.settings.sampling import Sampling
from gerund.types import Rendered
from tests.server.conftest import Running, events

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]


def test_chat(live: Running, served_lm: Any) -> None:
    how: dict[str, Any] = {"temperature": 0.9, "top_p": 0.8, "min_p": 0.01, "top_k": 20, "frequency_penalty": 0.5,
                           "presence_penalty": 0.25, "repetition_penalty": 1.1, "seed": 3}  # fmt: skip
    found = live.ok("/v1/chat/completions", messages=HELLO, max_tokens=8, n=3, logit_bias={"70": -5}, **how)
    expected = served_lm.chat(HELLO, 8, Sampling(**how, logit_bias={70: -5}), n=3)
    assert [one["message"]["content"] for one in found["choices"]] == [one.text for one in expected]
    assert len({one.text for one in expected}) == 3
    chunks = events(live, "/v1/chat/completions", messages=HELLO, max_tokens=8, n=3, logit_bias={"70": -5}, **how)
    texts, reasons = [""] * 3, [None] * 3
    for chunk in chunks:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    assert texts == [one.text for one in expected]
    assert reasons == [one.finish_reason for one in expected]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert found["usage"]["completion_tokens"] == sum(one.usage.completion_tokens for one in expected)
    assert found["usage"]["prompt_tokens"] == expected[0].usage.prompt_tokens, "the prompt is read once"


@pytest.mark.slow
def test_seeds_repeat_and_their_absence_does_not(live: Running) -> None:
    def text(**more: Any) -> str:
        found = live.ok("/v1/chat/completions", messages=HELLO, max_tokens=12, **more)
        return str(found["choices"][0]["message"]["content"])

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert len({text() for _ in range(4)}) > 1, "as in OpenAI's interface the temperature is 1 unless it is said"
    assert text(temperature=0) == text(temperature=0, seed=9)


def test_control_tokens_of_users_are_text_and_bos_is_one(live: Running, served_lm: Any) -> None:
    bos = served_lm.tokenizer.bos_token_id
    spelled = [{"role": "user", "content": "<s></s>"}]
    ids = live.ok("/tokenize", messages=spelled)["tokens"]
    assert (ids[0], ids.count(bos)) == (bos, 1)
    assert served_lm.tokenizer.eos_token_id not in ids
    assert live.ok("/tokenize", prompt="<s>a")["tokens"].count(bos) == 1
    found = live.ok("/v1/chat/completions", messages=spelled, max_tokens=1)
    assert found["usage"]["prompt_tokens"] == len(ids)


def test_control_tokens_that_are_meant_come_in_a_rendered_text_or_as_ids(live: Running, served_lm: Any) -> None:
    tokenizer = served_lm.tokenizer
    messages = [{"role": "user", "content": "</s>"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.eos_token_id in ids
    [expected] = served_lm.generate(Rendered(text), 6)
    assert expected.usage.prompt_tokens == len(ids) < served_lm.chat(messages, 6)[0].usage.prompt_tokens
    found = live.ok("/v1/completions", prompt=ids, max_tokens=6, temperature=0)
    assert found["choices"][0]["text"] == expected.text
    assert found["usage"]["prompt_tokens"] == len(ids)


def test_stop_and_logprobs(live: Running, served_lm: Any) -> None:
    [whole] = served_lm.generate("the", 12)
    stop = whole.text[3:5]
    [expected] = served_lm.generate("the", 12, stop=stop, logprobs=2)
    body: dict[str, Any] = {"prompt": "the", "max_tokens": 12, "temperature": 0, "stop": stop, "logprobs": 2}
    [choice] = live.ok("/v1/completions", **body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (expected.text, "stop", stop)
    logprobs = choice["logprobs"]
    assert logprobs["token_logprobs"] == pytest.approx([one.logprob for one in expected.logprobs], abs=1e-4)
    assert all(len(top) <= 2 for top in logprobs["top_logprobs"])
    before = [b"".join(one.utf8 for one in expected.logprobs[:at]) for at in range(len(expected.logprobs))]
    assert logprobs["text_offset"] == [len(codecs.utf_8_decode(spelled, "replace", False)[0]) for spelled in before]
    chunks = events(live, "/v1/completions", **body)
    assert "".join(one["choices"][0]["text"] for one in chunks) == expected.text
    streamed = [one["choices"][0]["logprobs"] for one in chunks if one["choices"][0]["logprobs"]]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for one in streamed for value in one[name]] == logprobs[name]


def _tokens(usage: dict[str, Any]) -> dict[str, int]:
    """Return the counts that do not depend on what was read before."""
    return {name: usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def test_tokens_that_an_earlier_prompt_left_are_counted(live: Running) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "a dog and a cat " * 8}], "max_tokens": 2}
    [first, whole] = [live.ok("/v1/chat/completions", **body)["usage"] for _ in range(2)]
    assert _tokens(first) == _tokens(whole)
    cached = whole["prompt_tokens_details"]["cached_tokens"]
    assert first["prompt_tokens_details"]["cached_tokens"] < cached < whole["prompt_tokens"]
    *_, last = events(live, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert last["usage"] == whole
    details = live.ok("/v1/responses", input=body["messages"], max_output_tokens=2)["usage"]["input_tokens_details"]
    assert details["cached_tokens"] == cached


@pytest.mark.slow
def test_more_tokens_than_there_is_room_for(live: Running, served_lm: Any) -> None:
    found = live.ok("/v1/completions", prompt="the " * 126, max_tokens=3000, temperature=0)
    [expected] = served_lm.generate("the " * 126, 3000)
    assert found["choices"][0]["text"] == expected.text
    assert found["usage"]["total_tokens"] <= 513


def test_best_of_is_what_the_scorer_likes_best(live: Running, served_lm: Any) -> None:
    body: dict[str, Any] = {"max_tokens": 6, "seed": 8, "best_of": 5, "n": 2}
    for prompt, route in (("the ant", "/v1/completions"), (HELLO, "/v1/chat/completions")):
        named = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
        found = live.ok(route, **named, **body)
        written = served_lm.generate([prompt], 6, Sampling(temperature=1, seed=8), n=5)
        prefix = prompt_text(served_lm.tokenizer, prompt)
        texts = [one.text for one in written if one.text.strip()]
        [scores] = served_lm.score([prefix], [texts], scorer="avg_cll")
        by_score = live.ok(route, **named, **body, scorer="avg_cll")
        best = [text for _, text in sorted(zip(scores, texts, strict=True), reverse=True)][:2]
        shown = [one.get("text", one.get("message", {}).get("content")) for one in by_score["choices"]]
        assert shown == best, route
        assert by_score["choices"][0]["rank_score"] >= by_score["choices"][1]["rank_score"]
        assert len(found["choices"]) == 2
        assert found["usage"]["completion_tokens"] == sum(one.usage.completion_tokens for one in written)


# ---------------------------------------------------------------------------------------------------------- embedding


def test_token_vectors(live: Running, served_lm: Any) -> None:
    texts = ["a cat", "the rain"]
    for kind, is_query in (("search_query", True), ("document", False)):
        found = live.ok("/v1/embeddings", input=texts, multi=True, input_type=kind)
        for item, wanted in zip(found["data"], served_lm.encode_multi(texts, is_query=is_query), strict=True):
            np.testing.assert_allclose(np.array(item["embedding"]), wanted, atol=1e-5)
    ranked = live.ok("/v1/rerank", query="a cat", documents=["the rain", "a cat"], by="maxsim")["results"]
    expected = served_lm.rerank("a cat", ["the rain", "a cat"], by="maxsim")
    assert [item["index"] for item in ranked] == expected.indices
    answer = live.post("/v1/embeddings", input="a" * 3000, multi=True, truncate=True)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["total_tokens"] == served_lm.max_length
    assert answer.headers["X-Gerund-Fingerprint"] == served_lm.fingerprint()
    error = live.post("/v1/embeddings", input="a" * 3000, multi=True).json()["error"]
    assert error["code"] == "context_length_exceeded"
    for more in ({"dimensions": 3}, {"encoding_format": "base64"}, {"prompt": "a: "}, {"input": [1, 2]}, {"input": ""}):
        assert live.post("/v1/embeddings", **{"input": texts, "multi": True, **more}).status_code == 400


def test_embeddings(live: Running, served_lm: Any) -> None:
    texts = ["the ant", "a", "rain in the sun"]
    expected = served_lm.encode_with_usage(texts)
    found = live.ok("/v1/embeddings", input=texts)
    assert np.allclose([one["embedding"] for one in found["data"]], expected.vectors, atol=1e-5)
    assert found["usage"]["prompt_tokens"] == sum(expected.token_counts)
    coded = live.ok("/v1/embeddings", input=texts, encoding_format="base64")
    vectors = [np.frombuffer(base64.b64decode(one["embedding"]), "<f4") for one in coded["data"]]
    assert np.array_equal(np.float32([one["embedding"] for one in found["data"]]), vectors)
    cut = live.ok("/v1/embeddings", input=texts, dimensions=5)
    assert np.allclose([one["embedding"] for one in cut["data"]], served_lm.encode(texts, dimensions=5), atol=1e-5)
    asked = live.ok("/v1/embeddings", input=texts[0], prompt="Question: ")
    assert np.allclose(asked["data"][0]["embedding"], served_lm.encode(texts[0], prompt="Question: "), atol=1e-5)


def test_token_ids_are_read_as_their_text(live: Running, served_lm: Any) -> None:
    text = "the ant in rain"
    with_specials = live.ok("/tokenize", prompt=text)["tokens"]
    without = live.ok("/tokenize", content=text)["tokens"]
    assert len(with_specials) == len(without) + 1
    for ids in (with_specials, without):
        [found] = live.ok("/v1/embeddings", input=ids)["data"]
        assert np.allclose(found["embedding"], served_lm.encode(text), atol=1e-5)
    assert live.ok("/detokenize", tokens=without)["content"] == text


@pytest.mark.parametrize("ids", [[57668, 53901], [70, 1, 70], [71, 107], [2]])
def test_token_ids_of_another_tokenizer_are_refused(live: Running, ids: list[int]) -> None:
    # Beyond the vocabulary; control tokens inside; letters that merge; a control token alone.
    if ids == [71, 107]:
        ids = [live.ok("/tokenize", content=letter)["tokens"][0] for letter in "th"]
    found = live.post("/v1/embeddings", input=[ids])
    assert (found.status_code, found.json()["error"]["code"]) == (400, "foreign_token_ids"), found.text
    assert "check_embedding_ctx_length=False" in found.json()["error"]["message"]


def test_vectors_of_another_encoder_are_refused(live: Running, served_lm: Any) -> None:
    own = served_lm.fingerprint()
    header = {"X-Gerund-Fingerprint": own}
    found = live.client.post("/v1/embeddings", json={"input": "a"}, headers=header)
    assert found.headers["X-Gerund-Fingerprint"] == found.json()["fingerprint"] == own
    cut = live.client.post("/v1/embeddings", json={"input": "a", "dimensions": 4}, headers=header)
    assert (cut.status_code, cut.json()["error"]["code"]) == (409, "fingerprint_mismatch")
    header = {"X-Gerund-Fingerprint": served_lm.fingerprint(4)}
    cut = live.client.post("/v1/embeddings", json={"input": "a", "dimensions": 4}, headers=header)
    assert cut.json()["fingerprint"] == served_lm.fingerprint(4) != own


def test_long_texts_are_cut_only_on_request(live: Running, served_lm: Any) -> None:
    long = "the ant " * 400
    found = live.post("/v1/embeddings", input=["a", long])
    assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert found.json()["error"]["param"] == "input.1"
    cut = live.ok("/v1/embeddings", input=["a", long], truncate=True)
    with pytest.warns(UserWarning, match="were cut"):
        expected = served_lm.encode(["a", long])
    assert np.allclose([one["embedding"] for one in cut["data"]], expected, atol=1e-5)


# -------------------------------------------------------------------------------------------------- rerank and scores

DOCUMENTS = ["rain in the sun", "the ant", "thin air"]
# A server keeps the documents that it has read for earlier requests, in batches of other sizes, which bfloat16 rounds
# otherwise.
ROUNDING = 0.01


@pytest.mark.parametrize("by", [None, "vectors", "likelihood"])
def test_rerank(live: Running, served_lm: Any, by: Any) -> None:
    expected = served_lm.rerank("the ants", DOCUMENTS, by=by)
    body: dict[str, Any] = {"query": "the ants", "by": by}
    for route, documents in (("/v1/rerank", DOCUMENTS), ("/v2/rerank", [{"text": one} for one in DOCUMENTS]),
                             ("/rerank", DOCUMENTS)):  # fmt: skip
        found = live.ok(route, **body, documents=documents, return_documents=True)
        assert [one["index"] for one in found["results"]] == expected.indices
        assert [one["relevance_score"] for one in found["results"]] == pytest.approx(expected.scores, abs=ROUNDING)
        assert [one["document"]["text"] for one in found["results"]] == [DOCUMENTS[at] for at in expected.indices]
    top = live.ok("/v1/rerank", **body, documents=DOCUMENTS, top_n=1)
    assert [one["index"] for one in top["results"]] == expected.indices[:1]
    assert "document" not in top["results"][0]


@pytest.mark.parametrize("by", [None, "likelihood"])
def test_so_many_tokens_of_each_document_count(live: Running, served_lm: Any, by: Any) -> None:
    long = [f"{one} and so on and on" for one in DOCUMENTS]
    ids = [served_lm.tokenizer(one, add_special_tokens=False)["input_ids"][:5] for one in long]
    expected = served_lm.rerank("the ants", served_lm.tokenizer.batch_decode(ids), by=by)
    found = live.ok("/v2/rerank", query="the ants", documents=long, by=by, max_tokens_per_doc=5, return_documents=True)
    assert [one["index"] for one in found["results"]] == expected.indices
    assert [one["relevance_score"] for one in found["results"]] == pytest.approx(expected.scores, abs=ROUNDING)
    assert [one["document"]["text"] for one in found["results"]] == [long[at] for at in expected.indices]
    whole = live.ok("/v2/rerank", query="the ants", documents=long, by=by, max_tokens_per_doc=500)
    assert whole["results"] == live.ok("/v2/rerank", query="the ants", documents=long, by=by)["results"]


def test_score(live: Running, served_lm: Any) -> None:
    texts = [" ant", " rain in"]
    for scorer in (None, "avg_cll", "overlap"):
        found = live.ok("/v1/score", prefix="the thin", continuations=texts, scorer=scorer)
        [expected] = served_lm.score(["the thin"], [texts], scorer=scorer)
        assert [one["score"] for one in found["data"]] == pytest.approx(expected, abs=1e-5)
    alike = live.ok("/v1/score", text_1="the ant", text_2=DOCUMENTS)
    assert [one["score"] for one in alike["data"]] == pytest.approx(
        served_lm.similarity("the ant", DOCUMENTS)[0].tolist(), abs=1e-5
    )
    assert live.ok("/v1/score", text_1=DOCUMENTS, text_2="the ant")["data"] == alike["data"]
    pairs = live.ok("/v1/score", text_1=DOCUMENTS, text_2=DOCUMENTS)
    assert [one["score"] for one in pairs["data"]] == pytest.approx([1.0] * 3, abs=1e-5)


# ---------------------------------------------------------------------------------------------------------- infilling


def test_infill(live: Running, served_lm: Any) -> None:
    text = "the ant [blank] in the [blank] air"
    expected = served_lm.infill(text, lengths=[1, 2])
    found = live.ok("/infill", text=text, lengths=[1, 2])
    assert (found["text"], found["lengths"]) == (expected.text, expected.lengths)
    pieces = text.split("[blank]")
    again = live.ok("/infill", pieces=pieces, lengths=[1, 2])
    assert (again["text"], again["spans"]) == (found["text"], found["spans"])
    assert [one.lstrip(" ") for one in found["inserts"]] == [one.lstrip(" ") for one in expected.spans]
    assert not any(one.startswith(" ") and piece.endswith(" ") and not span.startswith("  ")
                   for one, piece, span in zip(found["inserts"], pieces, expected.spans, strict=False))  # fmt: skip
    llama = live.ok("/infill", input_prefix="the ant", input_suffix=" air", n_predict=2)
    assert llama["content"] == served_lm.infill("the ant[blank] air", max_tokens=2).spans[0]
    other = live.ok("/infill", text="the [blank] ____ air", blank="____", lengths=1)
    assert other["text"].startswith("the [blank]"), "what is no gap stays as it is"


def test_a_model_that_was_not_trained_to_fill_gaps_says_so(live: Running) -> None:
    said = infilling.untrained_to_fill("tiny")
    assert live.ok("/infill", text="the ant [blank] air", lengths=1)["warning"] == said
    assert "warning" not in live.ok("/infill", text="the ant [blank] air", method="left-only")
    assert live.ok("/v1/completions", prompt="the ant ", suffix=" air", max_tokens=1)["warning"] == said
    assert "warning" not in live.ok("/v1/completions", prompt="the ant", max_tokens=1)


def test_suffix_is_infill(live: Running, served_lm: Any) -> None:
    body: dict[str, Any] = {"prompt": "the [blank] ant ", "suffix": " air", "max_tokens": 3}
    expected = served_lm.infill("the [blank] ant @@ air", blank="@@", max_tokens=3)
    found = live.ok("/v1/completions", **body)
    assert found["choices"][0]["text"] == expected.spans[0].removeprefix(" ")
    assert found["usage"]["completion_tokens"] == expected.lengths[0]
    *chunks, usage = events(live, "/v1/completions", **body, stream_options={"include_usage": True})
    assert "".join(one["choices"][0]["text"] for one in chunks) == found["choices"][0]["text"]
    assert usage["usage"] == found["usage"]


def test_markers_stand_in_no_piece() -> None:
    assert infilling.marker(["a", "b"]) == "[blank]"
    for pieces in (["a [blank]", "b"], ["[blan", "k]"], ["[blank", "[blank 1] [blank]"], ["[blank]" * 3] * 3):
        found = infilling.marker(pieces)
        assert found.join(pieces).split(found) == pieces


# -------------------------------------------------------------------------------------------------------------- state


def test_state(live: Running, served_lm: Any) -> None:
    card = live.client.get("/v1/models").json()["data"][0]
    assert (card["id"], card["max_model_len"], card["dimensions"]) == ("tiny", 512, served_lm.dimensions)
    assert live.client.get("/v1/models/tiny").json() == card
    assert live.client.get("/v1/models/other").status_code == 404
    health = live.client.get("/health").json()
    assert health["status"] == "ok"
    assert health["guarantee"] in ("bits of generate", "same text under any load", "none")
    assert health["fingerprint"] == served_lm.fingerprint()


def test_metrics(live: Running) -> None:
    def number(name: str) -> float:
        lines = live.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name) and not line.startswith("#"))

    texts, written = number("gerund_texts_encoded_total"), number("gerund_tokens_written_total")
    waits = number("gerund_wait_seconds_count")
    live.ok("/v1/embeddings", input=["confidential", "b"])
    live.ok("/v1/completions", prompt="confidential", max_tokens=3, logit_bias={"2": -100}, temperature=0)
    assert number("gerund_texts_encoded_total") == texts + 2
    assert number("gerund_tokens_written_total") == written + 3
    assert number("gerund_wait_seconds_count") == waits + 2
    assert number('gerund_requests_total{route="/v1/embeddings",status="200"}') >= 1
    assert "confidential" not in live.client.get("/metrics").text


def test_a_temperature_as_good_as_none_disturbs_nobody(live: Running) -> None:
    def written(temperature: float) -> str:
        found = live.ok("/v1/completions", prompt="the", max_tokens=6, temperature=temperature, seed=1)
        return str(found["choices"][0]["text"])

    assert {written(temperature) for temperature in (0, 1e-6, 2e-38, 1e-45, 5e-324)} == {written(0)}


def test_openapi_says_what_is_sent(live: Running) -> None:
    found = live.client.get("/openapi.json").json()
    for path, own in found["paths"].items():
        for operation in own.values():
            assert "422" not in operation["responses"], path
            assert {"400", "401", "404", "413", "429", "503", "504"} <= set(operation["responses"]), path
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert "text/event-stream" in found["paths"][path]["post"]["responses"]["200"]["content"]


def test_forms(live: Running, served_lm: Any) -> None:
    pytest.importorskip("llguidance")
    schema = {"enum": ["yes", "no"]}
    body: dict[str, Any] = {"messages": HELLO, "max_tokens": 64, "temperature": 0}
    [expected] = served_lm.chat(HELLO, 64, schema=schema)
    assert json.loads(expected.text) in ("yes", "no")
    for form in (  # OpenAI's, and llama.cpp's
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
        {"type": "json_object", "schema": schema},
    ):
        found = live.ok("/v1/chat/completions", **body, response_format=form)
        assert found["choices"][0]["message"]["content"] == expected.text
    text = live.ok("/v1/chat/completions", **{**body, "max_tokens": 5}, response_format={"type": "json_object"})
    assert text["choices"][0]["message"]["content"].startswith("{")
    plain = live.ok("/v1/chat/completions", **{**body, "max_tokens": 5}, response_format={"type": "text"})
    assert plain["choices"] == live.ok("/v1/chat/completions", **{**body, "max_tokens": 5})["choices"]


@pytest.mark.parametrize(
    ("form", "options"),
    [
        ({"structured_outputs": {"regex": "[a-c]{3}"}}, {"regex": "[a-c]{3}"}),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
        ({"structured_outputs": {"json": {"enum": ["a"]}}}, {"schema": {"enum": ["a"]}}),
        ({"guided_regex": "[a-c]{3}"}, {"regex": "[a-c]{3}"}),
        ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
        ({"guided_json": '{"enum": ["a"]}'}, {"schema": {"enum": ["a"]}}),
    ],
)
def test_forms_in_the_words_of_vllm(live: Running, served_lm: Any, form: Any, options: Any) -> None:
    pytest.importorskip("llguidance")
    found = live.ok("/v1/completions", prompt="the", max_tokens=8, temperature=0, **form)
    [expected] = served_lm.generate("the", 8, **options)
    assert (found["choices"][0]["text"], found["choices"][0]["finish_reason"]) == (expected.text, "stop")


ITSELF: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"allOf": [{"$ref": "#"}]},
    {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "required": ["a"], "additionalProperties": False,
     "$defs": {"n": {"$ref": "#/$defs/n"}}},
]  # fmt: skip


@pytest.mark.parametrize("schema", ITSELF)
def test_a_schema_that_is_defined_by_itself_alone(live: Running, schema: dict[str, Any]) -> None:
    pytest.importorskip("llguidance")
    found = live.post("/v1/completions", prompt="the", max_tokens=40, guided_json=schema, seed=1)
    assert found.status_code == 400, found.text
    assert "defined only by itself" in found.json()["error"]["message"]
    assert found.json()["error"]["param"] == "guided_json"


def test_a_schema_may_contain_itself(live: Running) -> None:
    pytest.importorskip("llguidance")
    tree = {"type": "object", "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}, "required": ["a"],
            "additionalProperties": False}  # fmt: skip
    found = live.ok("/v1/completions", prompt="the", max_tokens=12, guided_json=tree, temperature=0)
    assert found["choices"][0]["text"].lstrip().startswith("{")


@pytest.mark.slow
def test_the_models_own_scorer_ranks_its_texts() -> None:
    # In bfloat16 the texts of an engine are those of `generate` on some processors only.
    bundled = gerund.load(dtype="float32")
    with Running(bundled, ServerConfig(), []) as running:
        assert running.client.get("/v1/models").json()["data"][0]["scorer"] == "own"
        body: dict[str, Any] = {"prompt": "The old man", "max_tokens": 8, "seed": 8, "best_of": 5, "n": 2}
        found = running.ok("/v1/completions", **body)["choices"]
        named = running.ok("/v1/completions", **body, scorer="own")["choices"]
        assert [one["text"] for one in named] == [one["text"] for one in found]
        other = running.ok("/v1/completions", **body, scorer="pmi")["choices"]
        assert [one["rank_score"] for one in other] != [one["rank_score"] for one in found]
