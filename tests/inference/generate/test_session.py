"""A pass that is kept: the vector is encode's, and what is written is what generate writes, bit for bit."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import gerund
from gerund import AttentionPlan, ConfigError, DataError, Sampling, Session, TextError
from gerund.attention.layer_state import CACHE
from gerund.errors import FingerprintError, OutputExistsError
from gerund.inference.generate import generation
from gerund.inference.generate.session import SETTINGS, TENSORS
from gerund.language_model import LanguageModel
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.ready_made import closed
from tests.threads import at_once
from tests.tiny import CONFIGS, byte_tokenizer, tiny_lm

TEXT = "in another the thing"
SAMPLED = Sampling(temperature=1.0, top_p=0.95, seed=8)
SOME = ["llama", "gpt2", "opt", "mistral", "gemma2", "gpt_oss"]


def build(model_type="llama", tokenizer=None, **settings):
    settings = {"attention": AttentionPlan("causal"), **settings}
    return tiny_lm(model_type, tokenizer, changes={"vocab_size": 300}, **settings)


@pytest.fixture
def seen(monkeypatch):
    """The logits of every step of whatever is generated."""
    logits = []
    plain = generation._Chooser.__call__

    def noting(self, input_ids, scores):
        logits.append(scores.clone())
        return plain(self, input_ids, scores)

    monkeypatch.setattr(generation._Chooser, "__call__", noting)
    return logits


@torch.no_grad()
def steps(model, ids, written):
    """Return the logits of one prefill and of one step a token, as plain transformers makes them."""
    output = model(torch.tensor([ids]), use_cache=True, logits_to_keep=1)
    found = [output.logits[:, -1]]
    for token in written:
        output = model(torch.tensor([[token]]), use_cache=True, **{CACHE: output[CACHE]})
        found.append(output.logits[:, -1])
    return found


@pytest.mark.sweep(quick=5, check=5)
@pytest.mark.parametrize("append_eos", [True, False])
@pytest.mark.parametrize("model_type", CONFIGS)
def test_logits_are_those_of_a_fresh_prefill_and_its_steps(model_type, append_eos, seen):
    lm = build(model_type, append_eos=append_eos)
    vector, session = lm.encode_and_prefill(TEXT)
    np.testing.assert_allclose(vector, lm.encode([TEXT])[0], atol=2e-6)
    for sampling in (None, SAMPLED):
        seen.clear()
        result = session.generate(8, sampling)
        own = list(seen)
        seen.clear()
        assert lm.generate([TEXT], 8, sampling) == [result]
        assert len(result.token_ids) > 2
        wanted = steps(lm.model, lm.tokenizer(TEXT).input_ids, result.token_ids)
        for one, other, plain in zip(own, seen, wanted, strict=False):
            assert torch.equal(one, other)
            assert torch.equal(one, plain)
        assert len(own) == len(seen) >= len(result.token_ids)


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("pooling", ["mean", "weighted-mean", "last", "first", "last-mean"])
@pytest.mark.parametrize("append_eos", [False, True])
@pytest.mark.parametrize("settings", [{}, {"normalize": False}, {"pool_prompt": True}])
def test_the_vector_is_that_of_encode(pooling, append_eos, settings):
    lm = build("gpt2", pooling=pooling, append_eos=append_eos, prompts={"query": "Find:\n"}, **settings)
    for before in ({}, {"prompt_name": "query"}, {"prompt": "the text: "}):
        vector, session = lm.encode_and_prefill(TEXT, **before)
        assert vector.dtype == np.float32
        np.testing.assert_allclose(vector, lm.encode([TEXT], **before)[0], atol=2e-5, rtol=1e-5)
        assert session.text == lm.encoder.prompt_text(**before) + TEXT
        assert [session.generate(5, SAMPLED)] == lm.generate([session.text], 5, SAMPLED)


@pytest.mark.sweep(quick=3, check=4)
@pytest.mark.parametrize("model_type", SOME)
def test_it_may_be_continued_again_and_again_and_from_several_threads_at_once(model_type):
    lm = build(model_type, append_eos=True)
    _, session = lm.encode_and_prefill(TEXT)
    [greedy], [drawn] = lm.generate([TEXT], 12), lm.generate([TEXT], 6, SAMPLED)
    for _ in range(2):
        assert session.generate(12) == greedy
        assert session.generate(6, SAMPLED) == drawn
    assert at_once([lambda: session.generate(12)] * 8) == [greedy] * 8


@pytest.mark.slow
def test_what_the_call_asks_counts_the_text_too():
    lm = build()
    _, session = lm.encode_and_prefill(TEXT)
    plain = session.generate(12)
    penalised = session.generate(12, Sampling(repetition_penalty=5.0))
    assert [penalised] == lm.generate([TEXT], 12, Sampling(repetition_penalty=5.0))
    assert penalised.token_ids != plain.token_ids


def test_the_end_token_ends_it():
    lm = build()
    _, session = lm.encode_and_prefill(TEXT)
    written = session.generate(9, SAMPLED).token_ids
    for place in (0, 1, 5):
        lm.model.generation_config.eos_token_id = written[place]
        result = session.generate(9, SAMPLED)
        assert result.finished
        assert result.token_ids == written[: written.index(written[place])]
        assert [result] == lm.generate([TEXT], 9, SAMPLED)


def test_half_precision(tmp_path):
    lm = build()
    lm = LanguageModel(lm.model.bfloat16(), lm.tokenizer, lm.encoder)
    vector, session = lm.encode_and_prefill(TEXT)
    assert vector @ lm.encode([TEXT])[0] > 0.999
    session.save(tmp_path / "kept")
    opened = Session.load(tmp_path / "kept", lm)
    assert opened._cache.layers[0].keys.dtype == torch.bfloat16
    assert [session.generate(9, SAMPLED)] == [opened.generate(9, SAMPLED)] == lm.generate([TEXT], 9, SAMPLED)


def test_a_tokenizer_that_closes_every_text_itself():
    tokenizer = closed(byte_tokenizer())
    lm = build("llama", tokenizer, pooling="last")
    vector, session = lm.encode_and_prefill(TEXT)
    assert session.token_ids == tokenizer(TEXT).input_ids[:-1]
    np.testing.assert_allclose(vector, lm.encode([TEXT])[0], atol=2e-6)
    assert [session.generate(5)] == lm.generate([TEXT], 5)


def test_control_tokens_of_a_prompt_are_parsed_and_those_of_the_text_are_not():
    lm = build(append_eos=True)
    vector, session = lm.encode_and_prefill("a</s>", prompt="</s>Q: ")
    assert session.token_ids.count(lm.tokenizer.eos_token_id) == 1
    np.testing.assert_allclose(vector, lm.encode(["a</s>"], prompt="</s>Q: ")[0], atol=2e-6)


def test_the_context_ends_the_text():
    lm = build()
    _, session = lm.encode_and_prefill("x" * 59)  # with <s> 60 of 64 tokens
    assert len(session.generate(30).token_ids) == 4
    assert [session.generate(30)] == lm.generate("x" * 59, 30)
    with pytest.raises(TextError, match="the text has 64 tokens and the model's context ends at 64"):
        lm.encode_and_prefill("x" * 63)


def test_texts_that_cannot_be_kept():
    lm = build(append_eos=True, max_length=20)
    for text, says in [
        ("", "The text is empty"),
        (" \n", "The text is empty"),
        ("x" * 19, "The text has 21 tokens; the limit is 20. Shorten it"),
        ("a\udcff", "the text is not valid Unicode"),
        (3, "text 0 is not a string but int"),
    ]:
        with pytest.raises(TextError, match=says):
            lm.encode_and_prefill(text)
    lm.encode_and_prefill("x" * 18)
    with pytest.raises(ConfigError, match="must be at least 1, got 0"):
        lm.encode_and_prefill(TEXT)[1].generate(0)


@pytest.mark.parametrize("plan", [name for name in gerund.PLAN_NAMES if name not in ("causal", "hybrid", "echo")])
def test_plans_that_are_not_causal(plan):
    lm = build("llama", attention=AttentionPlan(plan))
    with pytest.raises(ConfigError, match=r"The plan '.*' is not causal, .* attention='causal' and no skips"):
        lm.encode_and_prefill(TEXT)
    skipping = lm.with_encoder(replace(lm.encoder, attention=AttentionPlan("causal", skips=3)))
    with pytest.raises(ConfigError, match="The plan 'causal skips=3' is not causal"):
        skipping.encode_and_prefill(TEXT)
    again = lm.with_encoder(replace(lm.encoder, attention=AttentionPlan("causal")))
    assert [again.encode_and_prefill(TEXT)[1].generate(3)] == lm.generate([TEXT], 3)


def test_echo():
    with pytest.raises(ConfigError, match="The plan 'echo' reads the text twice"):
        build(attention=AttentionPlan("echo")).encode_and_prefill(TEXT)


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
def test_an_adapter(tiny_folder, tmp_path):
    adapter = make_adapter(tiny_folder, tmp_path / "lora")
    lm = gerund.load(tiny_folder, attention="causal", adapter=adapter, dtype="float32")
    with pytest.raises(ConfigError, match="encodes with an adapter and generates without it"):
        lm.encode_and_prefill(TEXT)
    lm.export(tmp_path / "merged", "merged")
    merged = gerund.load(tmp_path / "merged", dtype="float32")
    vector, session = merged.encode_and_prefill(TEXT)
    np.testing.assert_allclose(vector, lm.encode([TEXT])[0], atol=1e-5)
    assert [session.generate(5)] == merged.generate([TEXT], 5)


def test_a_session_says_what_it_holds():
    _, session = build().encode_and_prefill(TEXT)
    assert repr(session) == f"Session(text={TEXT!r})"


def test_what_is_read_on_stands_in_the_text_with_its_first_space(stories_folder):
    lm = gerund.load(stories_folder)
    session = lm.prefill("Once upon a time, there was a little girl named")
    written = session.generate(6)
    more = session.prefill(written.token_ids)
    assert more.text == session.text + written.text
    assert more.tail(len(session.token_ids)).text == written.text


@pytest.mark.parametrize("given", [" and then", "12", [300.7], 7, ["a"]])
def test_only_token_ids_are_read_on(given):
    lm = build()
    _, session = lm.encode_and_prefill(TEXT)
    with pytest.raises(TextError, match="`prefill` takes token ids"):
        session.prefill(given)


LONG_TEXT = "the cat sat on the mat and looked at the sea"
MORE = [70, 71, 72, 73, 74]


@pytest.fixture(scope="module")
def lm():
    return build()


@pytest.fixture
def kept(lm, tmp_path):
    lm.prefill(LONG_TEXT[:20]).save(tmp_path / "kept")
    return tmp_path / "kept"


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_comes_from_the_disk_is_bit_equal_to_what_was_read(model_type, tmp_path):
    lm = build(model_type)
    session = lm.prefill(LONG_TEXT[:20])
    session.save(tmp_path / "kept")
    opened = Session.load(tmp_path / "kept", lm)
    assert (opened.text, opened.token_ids, opened.n_bytes) == (LONG_TEXT[:20], session.token_ids, session.n_bytes)
    for sampling in (None, Sampling(temperature=1.0, seed=3)):
        [plain] = lm.generate(LONG_TEXT[:20], 8, sampling)
        assert session.generate(8, sampling) == opened.generate(8, sampling) == plain
    one, other = session.prefill(MORE), opened.prefill(MORE)
    assert torch.equal(one._logits_BV, other._logits_BV)
    assert torch.equal(session.prefill(MORE)._logits_BV, one._logits_BV)  # nothing was changed by reading on
    whole = lm.prefill([*session.token_ids, *MORE])
    torch.testing.assert_close(one._logits_BV, whole._logits_BV, atol=2e-5, rtol=1e-4)
    assert one.generate(8).token_ids == lm.generate([whole.token_ids], 8)[0].token_ids
    assert one.token_ids == whole.token_ids


def test_read_takes_what_generate_takes_and_streams_say_the_same(lm):
    for prompt in (LONG_TEXT, [1, 5, 7], ""):
        session = lm.prefill(prompt)
        [expected] = lm.generate([prompt], 6)
        assert session.generate(6) == expected
        stream = session.stream(6)
        assert ("".join(stream), stream.result) == (expected.text, expected)
    with pytest.raises(TextError, match="nothing to read"):
        session.prefill([])
    with pytest.raises(TextError, match="token id 300"):
        session.prefill([300])
    with pytest.raises(TextError, match="context ends at 64"):
        session.prefill([5] * 64)
    with pytest.raises(ConfigError, match="`n` must be 1, got 2"):
        session.stream(6, Sampling(temperature=1.0), n=2)


def test_another_model_and_one_that_was_trained_further_are_refused(kept):
    lm = build()
    Session.load(kept, lm)
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[3, 3] += 0.5
    with pytest.raises(FingerprintError, match="saved by another model"):
        Session.load(kept, lm)
    with pytest.raises(FingerprintError, match="bfloat16"):
        Session.load(kept, LanguageModel(build().model.bfloat16(), byte_tokenizer()))


def damaged(folder, name, change):
    path = folder / name
    path.write_bytes(change(bytearray(path.read_bytes())))


def flip(place):
    def change(content):
        content[place] ^= 1
        return content

    return change


@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((TENSORS, flip(place)) for place in (3, 40, -1, -3000)), (TENSORS, lambda content: content[:-10]),
        (TENSORS, lambda _: b""), (SETTINGS, lambda _: b"{}"), (SETTINGS, lambda _: b"[1]"),
        (SETTINGS, lambda _: b"\xff"),
        (SETTINGS, lambda content: content.replace(b'"lengths": [', b'"lengths": [1, ')),
        (SETTINGS, lambda content: content.replace(b'"token_ids": [', b'"token_ids": [9, ')),
    ],
)  # fmt: skip
def test_what_is_damaged_is_an_error_and_never_wrong(lm, kept, name, change):
    Session.load(kept, lm)
    damaged(kept, name, change)
    with pytest.raises(DataError, match="Read the text again"):
        Session.load(kept, lm)


def test_what_is_no_session(lm, kept, tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match="contains no session"):
            Session.load(folder, lm)
    (kept / TENSORS).unlink()
    with pytest.raises(DataError, match="Could not read"):
        Session.load(kept, lm)
    said = json.loads((kept / SETTINGS).read_text())
    (kept / SETTINGS).write_text(json.dumps({**said, "format": 99}))
    with pytest.raises(DataError, match="is not a session of this version"):
        Session.load(kept, lm)
    with pytest.raises(OutputExistsError):
        lm.prefill("a").save(kept)
    lm.prefill("a").save(kept, overwrite=True)
    assert Session.load(kept, lm).text == "a"


def test_recurrent_states_are_neither_saved_nor_read_on_from(tmp_path):
    lm = build("lfm2")
    session = lm.prefill("the cat")
    assert session.generate(4) == lm.generate("the cat", 4)[0]
    with pytest.raises(ConfigError, match="more than keys and values"):
        session.save(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    with pytest.raises(ConfigError, match="neither saved nor extended"):
        session.prefill([5])
