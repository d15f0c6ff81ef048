"""OpenAI's response objects: log-probabilities, text offsets, and prompts that are echoed."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from gerund.scoring.names import MODEL_NAMES, SCORER_NAMES
from gerund.server.generation_bodies import ScorerName
from gerund.server.openai_format import Echo, Form
from gerund.settings.sampling import Sampling
from gerund.types import Generation, TokenLogprob
from tests.server.conftest import Running, events

COMPLETE = "/v1/completions"


def spelled_bytes(token: str) -> bytes:
    """Return the bytes behind a token as OpenAI writes it."""
    return token.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1")


def logits_of(lm: Any, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = lm.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return found


def test_every_alternative_is_there_and_the_chosen_token_too(live: Running, served_lm: Any) -> None:
    body: dict[str, Any] = {"prompt": "the ant", "max_tokens": 20, "seed": 5, "logprobs": 4}
    [expected] = served_lm.generate("the ant", 20, Sampling(temperature=1, seed=5), logprobs=4)
    [choice] = live.ok(COMPLETE, **body)["choices"]
    found, partial = choice["logprobs"], 0
    for place, one in enumerate(expected.logprobs):
        token, logprob, top = (found[name][place] for name in ("tokens", "token_logprobs", "top_logprobs"))
        assert top[token] == logprob == pytest.approx(one.logprob, abs=1e-4)
        is_listed = one.token_id in [other.token_id for other in one.top]
        assert len(top) == (4 if is_listed else 5)
        assert sorted(top.values(), reverse=True)[:4] == pytest.approx([other.logprob for other in one.top], abs=1e-4)
        if token.startswith("bytes:"):
            assert spelled_bytes(token) == one.utf8
            partial += 1
    assert partial > 2


def test_tokens_that_spell_the_same_have_keys_of_their_own() -> None:
    top = (
        TokenLogprob(4, b"a", -0.5),
        TokenLogprob(9, b"a", -1.0),
        TokenLogprob(2, b"", -2.0),
        TokenLogprob(1, b"", -3.0),
    )
    one = TokenLogprob(7, b" \xf0\x9f", -4.0, top)
    form = Form("text", "m", control={1: "<s>", 2: "</s>"}.get)
    [choice] = form.whole([Generation("", [7], -4.0, False, logprobs=[one])], {})["choices"]
    assert choice["logprobs"]["tokens"] == ["bytes: \\xf0\\x9f"]
    assert choice["logprobs"]["top_logprobs"] == [
        {"a": -0.5, "token_id:9": -1.0, "</s>": -2.0, "<s>": -3.0, "bytes: \\xf0\\x9f": -4.0}
    ]


def test_logprobs_of_prompts(live: Running, served_lm: Any) -> None:
    texts = ["the ant in", "a", "日本 the"]
    prompts = [served_lm.tokenizer(text).input_ids for text in texts]
    body: dict[str, Any] = {"echo": True, "logprobs": 2, "max_tokens": 4, "seed": 3, "n": 2}
    found = live.ok(COMPLETE, prompt=texts, **body)["choices"]
    assert live.ok(COMPLETE, prompt=prompts, **body)["choices"] == found
    streamed: list[list[Any]] = [[] for _ in range(6)]
    for chunk in events(live, COMPLETE, prompt=texts, **body):
        [choice] = chunk["choices"]
        streamed[choice["index"]].append(choice)
    for choice, own in zip(found, streamed, strict=True):
        assert "".join(one["text"] for one in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for one in own if one["logprobs"] for value in one["logprobs"][name]] == values, name
    for number, choice in enumerate(found):
        text, ids = texts[number // 2], prompts[number // 2]
        own = choice["logprobs"]
        [expected] = served_lm.generate([[*ids]], 4, Sampling(temperature=1, seed=3), n=2)[number % 2 : number % 2 + 1]
        assert choice["text"] == text + expected.text
        logprobs_TV = logits_of(served_lm, [*ids, *expected.token_ids])
        chosen = [float(logprobs_TV[at, token]) for at, token in enumerate([*ids, *expected.token_ids][1:])]
        assert own["token_logprobs"][0] is own["top_logprobs"][0] is None
        assert own["token_logprobs"][1 : len(chosen) + 1] == pytest.approx(chosen, abs=1e-4)
        for at, top in enumerate(own["top_logprobs"][1 : len(ids)]):
            best = logprobs_TV[at].topk(2).values.tolist()
            assert sorted(top.values(), reverse=True)[:2] == pytest.approx(best, abs=1e-4)
            assert own["token_logprobs"][at + 1] in top.values()
        assert len({len(each) for each in own.values()}) == 1
        assert own["text_offset"][len(ids)] == len(text)
        assert own["tokens"][0] == "<s>"


def test_a_prompt_alone(live: Running, served_lm: Any) -> None:
    ids = served_lm.tokenizer("the ant in").input_ids
    body: dict[str, Any] = {"prompt": ids, "echo": True, "logprobs": 0, "max_tokens": 0}
    found = live.ok(COMPLETE, **body)
    [choice] = found["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the ant in", "length")
    assert choice["logprobs"]["tokens"][:2] == ["<s>", "t"] or len(choice["logprobs"]["tokens"]) == len(ids)
    counts = {"prompt_tokens": len(ids), "completion_tokens": 0, "total_tokens": len(ids)}
    assert found["usage"] == {**counts, "prompt_tokens_details": {"cached_tokens": 0}}
    assert all(len(top) == 1 for top in choice["logprobs"]["top_logprobs"][1:])
    chunks = events(live, COMPLETE, **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "the ant in"
    assert chunks[0]["choices"][0]["logprobs"] == choice["logprobs"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    plain = live.ok(COMPLETE, prompt="the ant", echo=True, max_tokens=0)["choices"][0]
    assert (plain["text"], plain["logprobs"]) == ("the ant", None)
    whole = [70] * 512  # as long as the context: nothing is written behind it
    assert len(live.ok(COMPLETE, **{**body, "prompt": whole})["choices"][0]["logprobs"]["tokens"]) == 512
    assert live.post(COMPLETE, **{**body, "prompt": whole, "max_tokens": 1}).status_code == 400


def test_offsets_after_a_prompt_whose_tokens_spell_a_space_more() -> None:
    form = Form("text", "m")
    form.echoes = [Echo("Hi", (TokenLogprob(1, b"", float("nan")), TokenLogprob(5, b" Hi", -1.0)))]
    written = Generation(" you", [6], -1.0, False, logprobs=[TokenLogprob(6, b" you", -1.0)])
    [choice] = form.whole([written], {})["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("Hi you", [0, 0, 2])


# ---------------------------------------------------------------------------------------------------------------------

REQUESTS = [
    ("the ant", " in the rain"),
    ("in another thing", " and"),
    ("a", "b"),
    ("日本", "日本 a"),
    ("the", " the the"),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bos", [False, True])
def test_lm_eval_reads_what_it_computes_on_the_weights(
    live: Running, served_lm: Any, served_folder: Path, bos: bool
) -> None:
    pytest.importorskip("lm_eval", reason="needs gerund[lm-eval]")
    completions = pytest.importorskip("lm_eval.models.openai_completions", reason="needs lm-eval[api]")
    from lm_eval.api.instance import Instance

    from gerund.evaluation.tasks.lm_eval import lm_eval_model

    def asked() -> list[Any]:
        return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(REQUESTS)]

    remote = completions.LocalCompletionsAPI(
        base_url=f"{live.url}/v1/completions", model="tiny", tokenizer=str(served_folder), max_length=64,
        tokenizer_backend="huggingface", batch_size=2, add_bos_token=bos,
    )  # fmt: skip
    local = lm_eval_model(served_lm)
    local.add_bos_token = bos
    found = remote.loglikelihood(asked(), disable_tqdm=True)
    expected = local.loglikelihood(asked(), disable_tqdm=True)
    assert [one[0] for one in found] == pytest.approx([one[0] for one in expected], abs=1e-3)
    assert [one[1] for one in found] == [one[1] for one in expected]


def test_offsets_of_characters_that_several_tokens_spell() -> None:
    spelled = ["日", "本", " ", "a"]
    tokens = [TokenLogprob(byte, bytes([byte]), -1.0) for byte in "日本 a".encode()]
    generation = Generation("日本 a", [one.token_id for one in tokens], -1.0, finished=False, logprobs=tokens)
    [choice] = Form("text", "m").whole([generation], {})["choices"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1, 1, 1, 2, 3]
    form, streamed = Form("text", "m"), []
    for place, text in enumerate(spelled):
        own = tokens[3 * place : 3 * place + 3] if place < 2 else tokens[4 + place : 5 + place]
        [chunk] = form.parts(0, [text], own)
        streamed += chunk["choices"][0]["logprobs"]["text_offset"]
    assert streamed == [0, 0, 0, 1, 1, 1, 2, 3]


def test_scorers_are_those_of_the_library() -> None:
    assert set(get_args(ScorerName)) == {*MODEL_NAMES, *SCORER_NAMES}


def test_impossible_logprobs_are_json() -> None:
    token = TokenLogprob(1, b"\xf0", float("-inf"), (TokenLogprob(2, b"b", float("-inf")),))
    one = Generation("b", [1], 0.0, True, logprobs=[token])
    for kind in ("chat", "text"):
        shown = Form(kind, "m").whole([one], {})  # type: ignore[arg-type]
        assert "-9999.0" in json.dumps(shown, allow_nan=False)
