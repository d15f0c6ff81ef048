"""Sessions on the disk: what was read is what is read again, of the same model, whole, or not at all."""

import json

import pytest
import torch

import gerund
from gerund import ConfigError, DataError, EncoderConfig, Sampling, Session, TextError
from gerund.errors import FingerprintError, OutputExistsError
from gerund.inference.generate.session_files import SETTINGS, TENSORS
from gerund.language_model import LanguageModel
from tests.tiny import CONFIGS, byte_tokenizer, tiny

TEXT = "the cat sat on the mat and looked at the sea"
MORE = [70, 71, 72, 73, 74]


def build(model_type="llama", seed=0):
    torch.manual_seed(seed)
    return LanguageModel(tiny(model_type, vocab_size=300), byte_tokenizer(), EncoderConfig())


@pytest.fixture(scope="module")
def lm():
    return build()


@pytest.fixture
def kept(lm, tmp_path):
    lm.read(TEXT[:20]).save(tmp_path / "kept")
    return tmp_path / "kept"


@pytest.mark.sweep(quick=5)
@pytest.mark.parametrize("model_type", CONFIGS)
def test_what_comes_from_the_disk_is_bit_equal_to_what_was_read(model_type, tmp_path):
    lm = build(model_type)
    session = lm.read(TEXT[:20])
    session.save(tmp_path / "kept")
    opened = Session.load(tmp_path / "kept", lm)
    assert (opened.text, opened.token_ids, opened.n_bytes) == (TEXT[:20], session.token_ids, session.n_bytes)
    for sampling in (None, Sampling(temperature=1.0, seed=3)):
        [plain] = lm.generate(TEXT[:20], 8, sampling)
        assert session.generate(8, sampling) == opened.generate(8, sampling) == plain
    one, other = session.read(MORE), opened.read(MORE)
    assert torch.equal(one._logits_BV, other._logits_BV)
    assert torch.equal(session.read(MORE)._logits_BV, one._logits_BV)  # nothing was changed by reading on
    whole = lm.read([*session.token_ids, *MORE])
    torch.testing.assert_close(one._logits_BV, whole._logits_BV, atol=2e-5, rtol=1e-4)
    assert one.generate(8).token_ids == lm.generate([whole.token_ids], 8)[0].token_ids
    assert one.token_ids == whole.token_ids


def test_read_takes_what_generate_takes_and_streams_say_the_same(lm):
    for prompt in (TEXT, [1, 5, 7], ""):
        session = lm.read(prompt)
        [expected] = lm.generate([prompt], 6)
        assert session.generate(6) == expected
        stream = session.stream(6)
        assert ("".join(stream), stream.result) == (expected.text, expected)
    with pytest.raises(TextError, match="nothing to read"):
        session.read([])
    with pytest.raises(TextError, match="token id 300"):
        session.read([300])
    with pytest.raises(TextError, match="context ends at 64"):
        session.read([5] * 64)
    with pytest.raises(ConfigError, match="n=2"):
        session.stream(6, Sampling(temperature=1.0), n=2)


def test_another_model_is_refused(lm, kept):
    other = build(seed=1)
    other.model.get_input_embeddings().weight.data[0, 0] += 1
    with pytest.raises(FingerprintError, match="written by another model"):
        Session.load(kept, other)
    with pytest.raises(FingerprintError, match="bfloat16"):
        Session.load(kept, LanguageModel(tiny("llama", vocab_size=300).bfloat16(), byte_tokenizer(), EncoderConfig()))


def test_weights_that_were_trained_further_are_another_model(kept):
    lm = build()
    Session.load(kept, lm)
    with torch.no_grad():
        lm.model.get_input_embeddings().weight[3, 3] += 0.5
    with pytest.raises(FingerprintError):
        Session.load(kept, lm)


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
    with pytest.raises(DataError, match="read the text anew"):
        Session.load(kept, lm)


def test_what_is_no_session(lm, kept, tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(DataError, match="holds no session"):
            Session.load(folder, lm)
    (kept / TENSORS).unlink()
    with pytest.raises(DataError, match="cannot be read"):
        Session.load(kept, lm)
    said = json.loads((kept / SETTINGS).read_text())
    (kept / SETTINGS).write_text(json.dumps({**said, "format": 99}))
    with pytest.raises(DataError, match="is no session of this version"):
        Session.load(kept, lm)
    with pytest.raises(OutputExistsError):
        lm.read("a").save(kept)
    lm.read("a").save(kept, overwrite=True)
    assert Session.load(kept, lm).text == "a"


def test_recurrent_states_are_neither_saved_nor_read_on_from(tmp_path):
    lm = build("lfm2")
    session = lm.read("the cat")
    assert session.generate(4) == lm.generate("the cat", 4)[0]
    with pytest.raises(ConfigError, match="more than keys and values"):
        session.save(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
    with pytest.raises(ConfigError, match="neither saved nor read on from"):
        session.read([5])


@pytest.mark.slow
def test_the_bundled_model_reads_a_document_once(tmp_path):
    lm = gerund.load()
    ids = lm.read(" ".join([TEXT] * 12)).token_ids
    question = lm.read("What did the cat look at?").token_ids
    session = lm.read(ids)
    session.save(tmp_path / "kept")
    opened = Session.load(tmp_path / "kept", lm)
    [plain] = lm.generate([[*ids, *question]], 12)
    assert opened.read(question).generate(12).text == plain.text
    assert opened._cache.layers[0].keys.dtype == lm.model.dtype
