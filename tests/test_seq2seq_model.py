"""A T5 with the verbs of a language model: vectors from its encoder, texts and fillings from its decoder."""

import gc
import json
import weakref

import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

import gerund
from gerund.errors import ConfigError, DataError, ModelError, TextError, UnsupportedModelError
from gerund.inference.infill import sentinels
from gerund.inference.infill.infilling import BlankedText
from gerund.inference.infill.sentinels import sentinel_ids, spans_of
from gerund.language_model import LanguageModel
from gerund.models.heads import ProjectionHead, read_head
from gerund.models.light_head import HeadConfig
from gerund.types import Generation, TokenLogprob
from tests.cli.helpers import run_cli
from tests.tiny import save_tiny, save_tiny_t5

TEXTS = ["the cat sat in an inn", "a tin", "then rain, and the end"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture
def lm(folder):
    return gerund.load(folder, dtype="float32")


def with_head(folder, place, **settings):
    lm = gerund.load(folder, dtype="float32")
    torch.manual_seed(3)
    lm.save(place)
    ProjectionHead(HeadConfig(width=32, **{"dimensions": 8, **settings})).save(place)
    return place


class TestEncoding:
    @pytest.mark.parametrize("pooling", ["mean", "first", "last"])
    def test_is_the_encoder_read_one_text_at_a_time(self, lm, folder, pooling):
        lm = gerund.load(folder, dtype="float32", pooling=pooling)
        found = lm.encode(TEXTS, normalize=False)
        plain = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        for text, vector in zip(TEXTS, found, strict=True):
            with torch.no_grad():
                states = plain.encoder(torch.tensor([lm.tokenizer(text)["input_ids"]])).last_hidden_state[0]
            expected = {"mean": states.mean(0), "first": states[0], "last": states[-1]}[pooling]
            np.testing.assert_allclose(vector, expected.numpy(), rtol=1e-4, atol=1e-5)

    def test_looks_both_ways(self, lm):
        before, after = lm.encode_tokens(["the cat", "the can"])
        assert np.abs(before[0] - after[0]).max() > 1e-3

    def test_words_and_similarity(self, lm):
        [words] = lm.encode_words([["the", "cat"]])
        assert words.shape == (2, 32)
        assert lm.similarity(["the cat"], ["the cat", "rain"])[0, 0] == pytest.approx(1.0, abs=1e-5)

    def test_prompt_is_not_pooled(self, lm):
        [plain], [prompted] = lm.encode_tokens("cat"), lm.encode_tokens("cat", prompt="Q:")
        assert len(prompted) == len(plain)

    @pytest.mark.slow
    @pytest.mark.parametrize("variant", ["paper", "released"])
    def test_a_head_makes_the_vectors(self, folder, tmp_path, variant):
        place = with_head(folder, tmp_path / "m", variant=variant)
        lm = gerund.load(place, dtype="float32")
        plain = gerund.load(folder, dtype="float32")
        assert lm.dimensions == 8
        states = torch.from_numpy(plain.encode(TEXTS, normalize=False))
        with torch.no_grad():
            expected = read_head(place)(states).numpy()
        np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), expected, rtol=1e-3, atol=1e-3)
        assert lm.fingerprint() != plain.fingerprint()
        lm.save(tmp_path / "again")
        np.testing.assert_array_equal(gerund.load(tmp_path / "again", dtype="float32").encode(TEXTS), lm.encode(TEXTS))

    def test_released_head_is_the_released_formula(self):
        torch.manual_seed(0)
        head = ProjectionHead(HeadConfig(width=6, dimensions=4, variant="released"))
        states = torch.randn(3, 6)
        gated = torch.nn.functional.gelu(states @ head.inner.weight.T, approximate="tanh") * (
            states @ head.gate.weight.T
        )
        plain = gated @ head.outer.weight.T
        twice = plain + plain  # the released code adds the vector to itself before the norm, which undoes it
        expected = twice / (twice.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(head(states), expected, rtol=1e-3, atol=1e-3)


class TestWriting:
    def test_is_that_of_transformers(self, lm, folder):
        plain = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        found = lm.generate(TEXTS, 8, logprobs=0)
        for text, one in zip(TEXTS, found, strict=True):
            ids = torch.tensor([lm.tokenizer(text)["input_ids"]])
            [expected] = plain.generate(ids, max_new_tokens=8, do_sample=False).tolist()
            assert one.token_ids == [token for token in expected[1:] if token != 2]
            with torch.no_grad():
                logprobs_NV = plain(ids, labels=torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
            expected = logprobs_NV[range(len(one.token_ids)), one.token_ids].tolist()
            assert [token.logprob for token in one.logprobs] == pytest.approx(expected, abs=1e-5)

    def test_draws_do_not_depend_on_the_batch(self, lm):
        sampling = gerund.Sampling(temperature=1.0, seed=4)
        together = lm.generate(TEXTS, 6, sampling)
        alone = lm.generate(TEXTS, 6, sampling, batch_size=1)
        assert [one.token_ids for one in together] == [one.token_ids for one in alone]

    def test_streams_what_it_generates(self, lm):
        assert "".join(lm.stream("the cat", 8)) == lm.generate("the cat", 8)[0].text

    def test_saved_again_it_writes_the_same(self, lm, tmp_path):
        lm.save(tmp_path / "m")
        assert gerund.load(tmp_path / "m", dtype="float32").generate(TEXTS, 8) == lm.generate(TEXTS, 8)


class TestFilling:
    def test_spans_of_what_was_written(self):
        assert spans_of([9, 1, 8, 2, 3], [9, 8, 7], 2) == [range(1, 2), range(3, 5)]
        assert spans_of([8, 2, 9, 1], [9, 8, 7], 2) == [range(3, 4), range(0)]
        assert spans_of([], [9], 1) == [range(0)]

    def test_puts_the_spans_where_they_belong(self, lm, monkeypatch):
        marks = sentinel_ids(lm.tokenizer)
        words = [lm.tokenizer(text, add_special_tokens=False)["input_ids"] for text in (" cat", " rain and")]
        written = [marks[0], *words[0], marks[1], *words[1], marks[2]]
        asked = []

        def write(model, tokenizer, prompts, settings):
            asked.extend(prompts)
            logprobs = [TokenLogprob(token, b"", -place / 4) for place, token in enumerate(written)]
            return [Generation("", written, 0.0, True, logprobs=logprobs)] if settings.logprobs == 0 else []

        monkeypatch.setattr(sentinels, "generate", write)
        found = lm.infill("The [blank] sat in the [blank].")
        assert asked == ["The<extra_id_0> sat in the<extra_id_1>."]
        assert found.text == "The cat sat in the rain and."
        assert found.spans == [" cat", " rain and"]
        assert found.lengths == [len(words[0]), len(words[1])]
        places = [range(1, 1 + len(words[0])), range(2 + len(words[0]), len(written) - 1)]
        assert found.scores == [-sum(each) / 4 / len(each) for each in places]

    def test_several_are_drawn_and_the_best_is_kept(self, lm):
        sampling = gerund.Sampling(temperature=1.0, seed=1)
        found = lm.infill("The [blank] sat.", samples=3, sampling=sampling, max_tokens=3)
        assert found.text.startswith("The")
        assert found.text.endswith(" sat.")
        assert found == lm.infill("The [blank] sat.", samples=3, sampling=sampling, max_tokens=3)

    @pytest.mark.parametrize(
        ("text", "more", "error", "message"),
        [
            ("no gap", {}, TextError, "has no \\[blank\\] to fill"),
            ("[blank]", {}, TextError, "nothing but"),
            ("a [blank] [blank] b", {}, TextError, "nothing between them"),
            ("a [blank] b", {"beams": 3}, ConfigError, "beams is for decoder-only models"),
            ("a [blank] b", {"lengths": 3}, ConfigError, "lengths is for decoder-only models"),
            ("a [blank] b", {"samples": 3}, ConfigError, "greedy samples are all the same"),
            ("a [blank] b", {"max_tokens": 0}, ConfigError, "at least 1"),
            ("a [blank] b" * 9, {}, ModelError, "has 8 sentinels, and the text has 9 blanks"),
        ],
    )
    def test_bad_input(self, lm, text, more, error, message):
        with pytest.raises(error, match=message):
            lm.infill(text, **more)

    def test_without_sentinels(self, tmp_path):
        lm = gerund.load(save_tiny_t5(tmp_path / "m", sentinels=0), dtype="float32")
        with pytest.raises(ModelError, match="no sentinels"):
            lm.infill("a [blank] b")

    def test_spaces(self):
        assert BlankedText.of("a  [blank] b", "[blank]", spaces=" ").pieces == ("a", " b")


class TestEncoderDecoder:
    def test_for_representation(self, folder, tmp_path):
        lm = gerund.load(with_head(folder, tmp_path / "m"), dtype="float32")
        half = lm.for_representation()
        np.testing.assert_array_equal(half.encode(TEXTS), lm.encode(TEXTS))
        assert half.fingerprint() == lm.fingerprint()
        kept = {tensor.data_ptr() for tensor in half.model.parameters()}
        assert kept == {tensor.data_ptr() for tensor in lm.model.encoder.parameters()}
        assert sum(t.numel() for t in half.model.parameters()) < 0.7 * sum(t.numel() for t in lm.model.parameters())
        assert not hasattr(half, "generate")

    @pytest.mark.slow
    def test_the_decoder_goes_with_the_whole_model(self, folder):
        lm = gerund.load(folder, dtype="float32")
        expected = lm.encode(TEXTS)
        half, decoder = lm.for_representation(), weakref.ref(lm.model.decoder)
        del lm
        gc.collect()
        assert decoder() is None
        np.testing.assert_array_equal(half.encode(TEXTS), expected)

    def test_for_classification_learns(self, folder):
        lm = gerund.load(folder, dtype="float32")
        torch.manual_seed(0)
        classifier = lm.for_classification(2, dropout=0.0)
        batch = lm.tokenizer(TEXTS, padding=True, return_tensors="pt")
        labels = torch.tensor([0, 1, 1])
        before = classifier(batch["input_ids"], batch["attention_mask"])
        assert before.loss is None
        expected = torch.from_numpy(lm.encode(TEXTS, normalize=False)) @ classifier.classifier.weight.T
        torch.testing.assert_close(before.logits, expected + classifier.classifier.bias, rtol=1e-4, atol=1e-4)
        optimizer = torch.optim.Adam(classifier.parameters(), lr=1e-2)
        losses = []
        for _ in range(20):
            out = classifier(batch["input_ids"], batch["attention_mask"], labels)
            out.loss.backward()
            losses.append(float(out.loss.detach()))
            optimizer.step()
            optimizer.zero_grad()
        assert losses[-1] < 0.5 * losses[0]
        for wrong in (1, "a", 2.5, True):
            with pytest.raises(ConfigError, match="nothing to tell apart"):
                lm.for_classification(wrong)

    def test_a_trained_encoder_has_another_fingerprint(self, folder, tmp_path):
        lm = gerund.load(folder, dtype="float32")
        other = lm.with_encoder(lm.encoder)
        before = lm.fingerprint()
        assert other.fingerprint() == before
        classifier = lm.for_classification(2)
        batch = lm.tokenizer(TEXTS, padding=True, return_tensors="pt")
        optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-2)
        classifier(batch["input_ids"], batch["attention_mask"], torch.tensor([0, 1, 1])).loss.backward()
        optimizer.step()
        assert lm.fingerprint() == other.fingerprint() != before
        lm.save(tmp_path / "out")
        assert gerund.load(tmp_path / "out", dtype="float32").fingerprint() == lm.fingerprint()


class TestRefusals:
    @pytest.mark.parametrize(
        ("call", "message"),
        [
            (lambda lm: lm.score(["a"], [["b"]]), "cannot say how probable a text is"),
            (lambda lm: lm.score(["a"], [["b"]], "pmi"), "cannot say how probable a text is"),
            (lambda lm: lm.span_logprobs("a", "b", "c"), "hybrid mask"),
            (lambda lm: lm.encode_and_prefill("a"), "keep what encoding has read"),
            (lambda lm: lm.prefill("a"), "keep what it has read"),
            (lambda lm: lm.export("x", "merged"), "cannot be exported"),
        ],
    )
    def test_verbs_of_decoder_only_models(self, lm, call, message):
        with pytest.raises(UnsupportedModelError, match=message):
            call(lm)

    def test_they_are_not_there(self, lm):
        for verb in ("prefill", "span_logprobs", "encode_and_prefill", "export"):
            assert not hasattr(lm, verb)
            assert hasattr(LanguageModel, verb)
        assert not hasattr(lm.for_representation(), "generate")
        with pytest.raises(AttributeError, match="'Seq2SeqModel' object has no attribute 'anything'"):
            _ = lm.anything

    def test_rerank(self, lm):
        with pytest.raises(ConfigError, match="re-rank with a decoder-only model"):
            lm.generate("the cat", 4, rerank=gerund.Rerank(2, scorer="overlap"))

    def test_other_scorers_are_fine(self, lm):
        [[right, wrong]] = lm.score(["the cat sat"], [["the cat", "rain"]], "overlap")
        assert right > wrong

    @pytest.mark.parametrize("attention", ["causal", "mask0-bidir"])
    def test_plans(self, folder, attention):
        with pytest.raises(ConfigError, match="attention must be bidir"):
            gerund.load(folder, attention=attention)

    def test_empty_prompt(self, lm):
        with pytest.raises(TextError, match="needs a text to read"):
            lm.generate(" ")

    def test_adapter(self, folder, tmp_path):
        with pytest.raises(ConfigError, match="an adapter for encoding is for decoder-only"):
            gerund.load(folder, adapter=tmp_path)

    def test_scorer(self, folder):
        assert gerund.load(folder).scorer is None

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "not valid JSON"),
            ("{}", "no 'head' entry"),
            ({"format": 9, "head": {}}, "has format 9"),
            ({"format": 1, "head": {}}, "does not say the width"),
            ({"format": 1, "head": {"width": 32, "wide": 1}}, "unknown field in head.json 'wide'"),
            ({"format": 1, "head": {"width": 32, "variant": "papper"}}, "unknown variant of a head 'papper'"),
            ({"format": 1, "head": {"width": 32, "dimensions": 0}}, "whole number from 1 to"),
            ({"format": 1, "head": {"width": 16}}, "does not fit head.json"),
        ],
    )
    def test_broken_heads(self, folder, tmp_path, content, message):
        place = with_head(folder, tmp_path / "m")
        (place / "head.json").write_text(content if isinstance(content, str) else json.dumps(content))
        with pytest.raises(gerund.GerundError, match=message):
            gerund.load(place)

    def test_a_head_of_another_width(self, folder, tmp_path):
        place = tmp_path / "m"
        gerund.load(folder).save(place)
        ProjectionHead(HeadConfig(width=16)).save(place)
        with pytest.raises(DataError, match="for states of 16 numbers, not 32"):
            gerund.load(place)


def test_a_decoder_only_model_may_have_a_head(tmp_path):
    folder = save_tiny(tmp_path / "m")
    ProjectionHead(HeadConfig(width=32, dimensions=8)).save(folder)
    lm = gerund.load(folder, dtype="float32")
    assert lm.encode("the cat").shape == (8,)
    merged = lm.export(tmp_path / "merged", "merged")
    np.testing.assert_allclose(
        gerund.load(merged.folder, dtype="float32").encode("the cat"), lm.encode("the cat"), atol=1e-5
    )


class TestCommandLine:
    @pytest.mark.slow
    def test_embed_generate_infill(self, folder, tmp_path):
        (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
        done = run_cli("embed", tmp_path / "texts.txt", "-m", folder, "-o", tmp_path / "v.npy")
        assert done.code == 0, done.err
        assert np.load(tmp_path / "v.npy").shape == (3, 32)
        done = run_cli("generate", "the cat", "-m", folder, "--max-new-tokens", 4, "--json")
        assert done.code == 0, done.err
        done = run_cli("infill", "the [blank] sat", "-m", folder, "--json", "--max-tokens", 3)
        assert done.code == 0, done.err
        assert json.loads(done.out)["text"].endswith(" sat")

    def test_refusals_are_plain(self, folder):
        done = run_cli("score", "a", "b", "-m", folder)
        assert done.code == 2
        assert "cannot say how probable a text is" in done.err
        assert "Traceback" not in done.err

    @pytest.mark.parametrize(
        "command",
        [
            ["doctor", "{m}"],
            ["demo", "-m", "{m}"],
            ["inspect", "{m}", "a cat", "--json"],
            ["negatives", "{texts}", "-o", "{out}", "-m", "{m}"],
            ["tune", "{m}", "--data", "{data}", "-o", "{out}"],
        ],
        ids=lambda command: command[0],
    )
    def test_commands_of_decoder_only_models(self, folder, tmp_path, command, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "texts.txt").write_text("A cat sat. " * 40)
        (tmp_path / "data" / "sts").mkdir(parents=True)
        (tmp_path / "data" / "sts" / "s.dev.tsv").write_text("1\ta\tb\n5\ta\ta\n")
        (tmp_path / "data" / "sts" / "s.test.tsv").write_text("1\ta\tb\n5\ta\ta\n")
        places = {"m": folder, "texts": tmp_path / "texts.txt", "out": tmp_path / "out", "data": tmp_path / "data"}
        done = run_cli(*(part.format(**places) for part in command))
        assert done.code == 2, (done.out, done.err)
        assert "Traceback" not in done.err
        assert "is an encoder-decoder and cannot" in done.err or "attention must be bidir" in done.err
