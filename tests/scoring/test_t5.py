"""T5 scorers against the released formula, on a random checkpoint of the released layout."""

import json

import numpy as np
import pytest
import torch
from transformers import T5Config, T5EncoderModel

import gerund
from gerund.errors import ConfigError, ModelError, TextError
from gerund.inference.encode.runtime import smallest_cosine
from gerund.models.sources import Source
from gerund.scoring import t5
from gerund.scoring.t5 import CONTINUATION, PREFIX, Side, T5Scorer, _tokenizer
from gerund.settings.sampling import Rerank, Sampling
from tests.tiny import byte_tokenizer

PREFIXES = ["the cat sat in", "an inn"]
CONTINUATIONS = [[" the rain", " a tin and another", " the end"], [" in the sea", " the end"]]
CONFIG = {
    "architectures": ["T5EncoderWithProjection"],
    "auto_map": {"AutoModel": "modeling_rankgen.T5EncoderWithProjection"},
    "d_ff": 48,
    "d_kv": 8,
    "d_model": 32,
    "num_heads": 4,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "feed_forward_proj": "gated-gelu",
    "is_encoder_decoder": True,
    "model_type": "t5",
    "tie_word_embeddings": False,
    "vocab_size": 300,
}


def random_state():
    """Return an encoder and a projection with weights large enough to tell texts apart."""
    torch.manual_seed(0)
    encoder = T5EncoderModel(T5Config(**{k: v for k, v in CONFIG.items() if k not in ("architectures", "auto_map")}))
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.2)
    return encoder.eval(), torch.randn(32, 32)


def save(folder, *, kind="bin", tokenizer=True, **changes):
    """Write a checkpoint as the released ones are: the code beside it would fail if it were run."""
    encoder, projection = random_state()
    state = {f"t5_encoder.{name}": value for name, value in encoder.state_dict().items()}
    state["projection.weight"] = projection
    for name, value in changes.pop("state", {}).items():
        state.pop(name) if value is None else state.__setitem__(name, value)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    (folder / "modeling_rankgen.py").write_text("raise SystemExit('remote code was run')")
    if kind == "bin":
        torch.save(state, folder / "pytorch_model.bin")
    else:
        from safetensors.torch import save_file

        own = {name: value.clone().contiguous() for name, value in state.items()}
        save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    if tokenizer:
        byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save(tmp_path_factory.mktemp("t5") / "scorer")


def by_formula(text, marker, most):
    """One text at a time, as the released encoder reads it."""
    encoder, projection = random_state()
    ids = byte_tokenizer()(marker + text)["input_ids"][:most]
    with torch.no_grad():
        first = encoder(input_ids=torch.tensor([ids])).last_hidden_state[0, 0]
    return (projection @ first).numpy()


@pytest.mark.parametrize("kind", ["bin", "safetensors"])
def test_scores_are_those_of_the_released_formula(tmp_path, kind):
    scorer = T5Scorer.load(save(tmp_path / "scorer", kind=kind), dtype="float32")
    found = scorer.score(PREFIXES, CONTINUATIONS)
    for prefix, texts, own in zip(PREFIXES, CONTINUATIONS, found, strict=True):
        one = by_formula(prefix, "pre ", 512)
        expected = [one @ by_formula(text.strip(), "suffi ", 128) for text in texts]
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=1e-4)


def test_long_texts_keep_their_start_as_released(folder):
    scorer = T5Scorer.load(folder, dtype="float32")
    long = "the cat sat in the rain and an inn " * 30
    [vector] = scorer.encode([long], PREFIX)
    np.testing.assert_allclose(vector, by_formula(long, "pre ", 512), rtol=1e-4, atol=1e-4)
    [vector] = scorer.encode([long], CONTINUATION)
    np.testing.assert_allclose(vector, by_formula(long, "suffi ", 128), rtol=1e-4, atol=1e-4)


def test_or_their_end():
    tokenizer = byte_tokenizer()
    whole = tokenizer("pre " + "abc" * 50)["input_ids"]
    marker = tokenizer("pre ", add_special_tokens=False)["input_ids"]
    kept = Side("pre ", 40, "end").read(tokenizer, "abc" * 50)
    assert len(kept) == 40
    assert kept == [*marker, *whole[-(40 - len(marker)) :]]
    assert Side("pre ", 400, "end").read(tokenizer, "abc") == tokenizer("pre abc")["input_ids"]


def test_batches_change_nothing(folder, monkeypatch):
    scorer = T5Scorer.load(folder, dtype="float32")
    texts = ["a" * n for n in (1, 30, 7, 7, 12)]
    whole = scorer.encode(texts, PREFIX)
    monkeypatch.setattr("gerund.scoring.t5._BATCH_TOKENS", 40)
    np.testing.assert_allclose(scorer.encode(texts, PREFIX), whole, atol=1e-5)


def test_ranks_what_another_model_writes(folder, tiny_folder):
    lm = gerund.load(tiny_folder, dtype="float32")
    sampling = Sampling(temperature=1.0, seed=0)
    rerank = Rerank(4, beams=2, every=3, scorer=str(folder))
    [one] = lm.generate("the cat", 9, sampling, rerank=rerank)
    [scores] = T5Scorer.load(folder).score(["the cat"], [[candidate.text for candidate in one.beams]])
    assert [candidate.rank_score for candidate in one.beams] == pytest.approx(scores, rel=1e-4)
    assert lm.score(["the cat"], [[one.text]], str(folder))[0][0] == pytest.approx(scores[0], rel=1e-4)


def test_prefixes_are_encoded_once(folder):
    scorer = T5Scorer.load(folder, dtype="float32")
    read = []
    encode = scorer._encode_prefixes
    scorer._encode_prefixes = lambda texts: (read.extend(texts), encode(texts))[1]
    first = scorer.score(PREFIXES, CONTINUATIONS)
    assert scorer.score([*PREFIXES, PREFIXES[0]], [*CONTINUATIONS, []]) == [*first, []]
    assert read == PREFIXES


class TestRefused:
    def test_another_model(self, tiny_folder):
        with pytest.raises(ModelError, match="is no T5 scorer: its config does not name T5EncoderWithProjection"):
            T5Scorer.load(tiny_folder)

    def test_missing_weights(self, tmp_path):
        folder = save(tmp_path / "scorer", state={"projection.weight": None})
        with pytest.raises(ModelError, match=r"projection\.weight missing from its weights"):
            T5Scorer.load(folder, dtype="float32")

    def test_no_tokenizer(self, tmp_path):
        folder = save(tmp_path / "scorer", tokenizer=False)
        with pytest.raises(ModelError, match="scorer has no tokenizer"):
            T5Scorer.load(folder, dtype="float32")
        with pytest.raises(ModelError, match=r"; put the files of google/t5-v1_1-base into the folder"):
            _tokenizer(Source("it", folder), str(folder), T5Config(d_model=768))

    def test_a_file_that_would_run_code(self, tmp_path):
        class Evil:
            def __reduce__(self):
                return (print, ("code of a checkpoint was run",))

        folder = save(tmp_path / "scorer", state={"evil": Evil()})
        with pytest.raises(ModelError, match="cannot load"):
            T5Scorer.load(folder, dtype="float32")

    def test_blank_texts(self, folder):
        with pytest.raises(TextError, match="continuation 1 of prefix 0 is empty"):
            T5Scorer.load(folder).score(["a"], [["b", " "]])

    def test_names_that_are_no_scorers(self, tiny_folder, tmp_path):
        lm = gerund.load(tiny_folder)
        with pytest.raises(ConfigError, match="unknown scorer 'absent'"):
            lm.score(["a"], [[" b"]], "absent")
        with pytest.raises(ModelError, match="holds no model"):
            lm.score(["a"], [[" b"]], str(tmp_path))


def test_bfloat16_is_chosen_where_it_is_quick_and_near_enough(folder, monkeypatch):
    exact = T5Scorer.load(folder, dtype="float32")
    assert exact.autocast is None
    monkeypatch.setattr(t5.interface, "cpu_has_bfloat16", lambda: False)
    assert T5Scorer.load(folder).autocast is None
    monkeypatch.setattr(t5.interface, "cpu_has_bfloat16", lambda: True)
    half = T5Scorer.load(folder)
    assert half.autocast == torch.bfloat16
    assert half.model.dtype == torch.float32
    one, other = exact.encode(PREFIXES, PREFIX), half.encode(PREFIXES, PREFIX)
    assert not np.array_equal(one, other)
    assert smallest_cosine(one, other) > 0.999
    monkeypatch.setattr(t5, "ENOUGH", 1.1)
    assert T5Scorer.load(folder).autocast is None
