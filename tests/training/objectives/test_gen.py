"""Answer tokens: losses and gradients against one text at a time, runs, and vectors that are read as text."""

import json

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError, TextError
from gerund.models.heads import AnswerTokens, ProjectionHead
from gerund.models.light_head import HeadConfig
from gerund.settings.encoder import AnswerConfig
from gerund.training.corpus.teachers import Answer, model_answers, read_texts
from gerund.training.objectives.gen import GenLosses, begin
from gerund.training.objectives.settings import GenConfig
from gerund.training.recipe import Recipe, load_recipe
from gerund.training.run import train
from tests.cli.helpers import run_cli
from tests.tiny import save_tiny_t5
from tests.training.conftest import adapter_settings, plain_settings, sentences
from tests.training.outcomes import read_log

_TEXTS = 24


def slow_losses(model, answers, head, texts, written, teacher):
    """Return the summed cross entropy and squared distance, one text and one token at a time."""
    embed, read, total, distance = model.get_input_embeddings(), answers.settings.read, 0.0, 0.0
    for ids, target, wanted_E in zip(texts, written, teacher, strict=True):
        whole = torch.cat([embed(torch.tensor(ids)), answers.embeddings])
        states_RW = model(inputs_embeds=whole[None], output_hidden_states=True).hidden_states[-1][0][-read:]
        states_RW = torch.stack([row / (row**2).sum().sqrt() for row in states_RW])
        vector_E = head.outer.weight @ states_RW.mean(0)
        distance += ((vector_E - wanted_E) ** 2).sum()
        given = states_RW if answers.settings.prefix == "states" else vector_E[None]
        prefix = torch.stack([answers.map.weight @ (row / (row**2).mean().sqrt()) + answers.map.bias for row in given])
        prefix = prefix.reshape(read, -1)
        before = [*answers.settings.before]
        for place, token in enumerate(target):
            rows = [embed(torch.tensor(before, dtype=torch.long)), prefix]
            rows.append(embed(torch.tensor(target[:place], dtype=torch.long)))
            logits_V = model(inputs_embeds=torch.cat(rows)[None]).logits[0, -1]
            total = total - logits_V.log_softmax(-1)[token]
    return total, distance


@pytest.mark.parametrize("prefix", ["states", "vector"])
def test_losses_and_gradients_are_those_of_one_text_at_a_time(base, prefix):
    model = gerund.load(base, attention="causal", dtype="float32").model
    settings = AnswerConfig(4, 3, prefix, before=(0,))
    answers = begin(AnswerTokens(settings, embedding=16, state=16, vector=5), model, 3)
    torch.manual_seed(0)
    head = ProjectionHead(HeadConfig(16, 5, "linear"))
    texts, written, teacher = [[0, 5, 9, 8], [0, 7]], [[11, 12, 1], [14, 13, 15, 16]], torch.randn(2, 5)
    batch = {
        "input_ids": torch.tensor([[0, 5, 9, 8, 2, 2, 2, 2], [0, 7, 2, 2, 2, 2, 2, 2]]),
        "real": torch.tensor([[1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 0, 0, 0, 0, 0, 0]]).bool(),
        "answer": torch.tensor([[11, 12, 1, 2], [14, 13, 15, 16]]),
        "answer_real": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]).bool(),
        "teacher": teacher,
    }
    losses = GenLosses(answers, head, GenConfig(kind="gen", teacher="x", tokens=4, read=3, prefix=prefix, mse=2.0))
    assert losses.counts(batch) == {"reconstruction": 7, "alignment": 2}
    fast = losses(model, batch)
    slow = slow_losses(model, answers, head, texts, written, teacher)
    assert fast["reconstruction"].item() == pytest.approx(slow[0].item(), rel=1e-5)
    assert fast["alignment"].item() == pytest.approx(2 * slow[1].item(), rel=1e-5)
    trained = losses.parameters()
    assert len(trained) == 4
    expected = torch.autograd.grad(slow[0] + 2 * slow[1], trained)
    for one, other in zip(torch.autograd.grad(sum(fast.values()), trained), expected, strict=True):
        assert float(other.abs().max()) > 0
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_without_a_token_before_every_text_the_prefix_is_all_that_is_read(base):
    model = gerund.load(base, attention="causal", dtype="float32").model
    answers = begin(AnswerTokens(AnswerConfig(4, 3), embedding=16, state=16, vector=5), model, 3)
    model.set_input_embeddings(NoIds(model.get_input_embeddings().weight))
    assert torch.equal(answers.opening(model, torch.ones(2, 5)), answers.prefix(torch.ones(2, 5)))


class NoIds(torch.nn.Module):
    """Embeddings that cannot look up nothing, as those of a packed network."""

    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, ids):
        raise AssertionError(ids)


def answering(recipe, folder):
    """Return a recipe on texts with answers, which are written into a folder."""
    rows = [{"text": sentences(number, 1), "answer": sentences(-number, 1)} for number in range(_TEXTS)]
    for name, part in (("texts", rows[4:]), ("valid", rows[:4])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    recipe["data"] = {"folder": str(folder), "cache": str(folder / "cache")}
    recipe["model"].pop("lora")
    recipe["encoder"] = {"attention": "causal"}
    sizes = {"batch_size": 4, "length": 24, "answer_length": 12, "tokens": 4, "read": 3}
    recipe["objectives"] = [
        {"kind": "gen", "teacher": "default", "files": ["texts.jsonl"], "validation": ["valid.jsonl"], **sizes}
    ]
    return recipe


@pytest.fixture
def settings(adapting, tmp_path):
    return answering(adapting, tmp_path)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory, base):
    """Return the folder of a model that has learned answer tokens."""
    recipe = adapter_settings(plain_settings(corpus, tmp_path_factory), base)
    recipe = answering(recipe, tmp_path_factory.mktemp("texts")) | {"steps": 60, "eval_steps": 60, "save_steps": 60}
    recipe["objectives"][0]["fit_head"] = 0
    return train(Recipe.model_validate(recipe))


@pytest.mark.slow
def test_a_run_learns_and_leaves_the_model_alone(trained, base, tmp_path):
    folder = trained
    log = read_log(folder.parent)
    # Little can be said to a model of random weights: the gradients are tested above.
    for name, factor in (("loss_reconstruction", 0.999), ("loss_alignment", 0.6)):
        values = [line[name] for line in log if name in line]
        assert np.mean(values[-5:]) < factor * np.mean(values[:3])
    assert any("val_alignment" in line for line in log)
    lm, plain = gerund.load(folder, dtype="float32"), gerund.load(base, attention="causal", dtype="float32")
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, lm.model.state_dict()[name].to(weight)), name
    assert lm.generate("the cat", 8)[0].token_ids == plain.generate("the cat", 8)[0].token_ids
    assert lm.dimensions == gerund.load().dimensions
    assert lm.space == gerund.load().space
    # As an adapter of the base alone.
    other = gerund.load(base, adapter=folder, dtype="float32")
    texts = ["the cat runs", "a small house by the river and a stone", "dog"]
    np.testing.assert_array_equal(lm.encode(texts), other.encode(texts))
    assert lm.fingerprint() == other.fingerprint() == json.loads((folder / "gerund.json").read_text())["fingerprint"]
    assert not np.allclose(lm.encode(texts), plain.with_encoder(lm.encoder).encode(texts)[:, :1])
    # One text at a time, by hand.
    answers, embed = lm.runtime.answers, lm.model.get_input_embeddings()
    for text, vector in zip(texts, lm.encode(texts, normalize=False), strict=True):
        whole = torch.cat([embed(torch.tensor(lm.tokenizer(text).input_ids)), answers.embeddings])[None]
        states = lm.model(inputs_embeds=whole, output_hidden_states=True).hidden_states[-1][0, -3:]
        states = torch.nn.functional.normalize(states, dim=-1)
        np.testing.assert_allclose((lm.head.outer.weight @ states.mean(0)).detach().numpy(), vector, atol=1e-5)
    # Loaded, saved and loaded again it is the same.
    lm.save(tmp_path / "again")
    np.testing.assert_array_equal(gerund.load(tmp_path / "again", dtype="float32").encode(texts), lm.encode(texts))


@pytest.mark.slow
def test_the_head_is_fitted_before_the_first_step(run):
    last = ("steps=1", "optimizer.learning_rate=1e-9", "eval_steps=1")
    fitted, random = run("fitted", *last), run("random", *last, "objectives.gen.fit_head=0")
    [one, other] = [
        json.loads((folder / "training.json").read_text())["validation_loss"] for folder in (fitted, random)
    ]
    assert one["alignment"] < 1 < other["alignment"]


@pytest.mark.slow
def test_a_vector_is_read_as_the_model_continues_its_embeddings(trained, base, tmp_path):
    folder = trained
    lm = gerund.load(folder, dtype="float32")
    vectors = lm.encode(["the cat runs", "blue river"])
    read = lm.read_vector(vectors, 6)
    assert lm.read_vector(vectors[1], 6) == read[1]
    assert lm.read_vector(["the cat runs", "blue river"], 6)[0].text == read[0].text
    assert [one.text for one in lm.read_vector(3 * vectors, 6)] == [one.text for one in read]
    embedded, ids = lm.runtime.answers.opening(lm.model, torch.from_numpy(vectors[:1])), []
    for _ in range(6):
        rows = torch.cat([embedded, lm.model.get_input_embeddings()(torch.tensor([ids], dtype=torch.long))], dim=1)
        ids.append(int(lm.model(inputs_embeds=rows).logits[0, -1].argmax()))
    written = read[0].token_ids
    assert written == ids[: len(written)]
    assert written
    # From the command line.
    np.save(tmp_path / "some.npy", vectors)
    asked = ("generate", "--from-vector", tmp_path / "some.npy", "-m", folder, "--max-new-tokens", 6, "--json")
    lines = [json.loads(line) for line in run_cli(*asked).out.splitlines()]
    assert [(line["row"], line["text"]) for line in lines] == [(row, one.text) for row, one in enumerate(read)]
    both = run_cli("generate", "a prompt", "--from-vector", tmp_path / "some.npy", "-m", folder)
    assert both.code == 2
    assert "a prompt belongs to another use" in both.err
    (tmp_path / "none.npy").write_text("nothing")
    assert "not a readable .npy file" in run_cli("generate", "--from-vector", tmp_path / "none.npy", "-m", folder).err
    with pytest.raises(TextError, match="dimensions each"):
        lm.read_vector(vectors[:, :3])
    with pytest.raises(TextError, match="finite"):
        lm.read_vector(np.full((1, lm.dimensions), np.nan, dtype=np.float32))
    with pytest.raises(TextError, match="is empty"):
        lm.read_vector(" ")
    with pytest.raises(ConfigError, match="no answer tokens"):
        gerund.load(base).read_vector(vectors)


@pytest.mark.slow
def test_states_are_read_of_texts_alone(run):
    lm = gerund.load(run("out", "steps=1", "objectives.gen.prefix=states"), dtype="float32")
    assert isinstance(lm.read_vector("the cat runs", 4).text, str)
    with pytest.raises(ConfigError, match="which a vector does not hold"):
        lm.read_vector(lm.encode("the cat"))


@pytest.mark.slow
def test_what_knows_no_answer_tokens_says_so(trained, tmp_path):
    folder = trained
    lm = gerund.load(folder, dtype="float32")
    for call, message in (
        (lambda: lm.encode_tokens(["the cat"]), "tokens pooled are not the text's"),
        (lambda: lm.encode_spans(["the cat"], [[(0, 3)]]), "tokens pooled are not the text's"),
        (lambda: lm.export(tmp_path / "merged", "merged"), "takes no answer tokens"),
        (lambda: lm.export(tmp_path / "st", "sentence-transformers"), "takes no answer tokens"),
        (lambda: lm.encode_and_prefill("the cat"), "takes no answer tokens"),
        (lambda: lm.with_encoder(gerund.EncoderConfig()), "encodes by answer tokens"),
        (lambda: gerund.load(folder, pooling="last"), "were trained for the encoder settings beside them"),
    ):
        with pytest.raises(ConfigError, match=message):
            call()
    plain = gerund.load(folder, adapter="none", dtype="float32")
    assert (plain.runtime.answers, plain.head, plain.dimensions) == (None, None, 16)


def test_the_model_answers_once(base, tmp_path, monkeypatch):
    lm = gerund.load(base, attention="causal", dtype="float32")
    texts = [sentences(number, 1) for number in range(3)]
    written = model_answers(lm.model, lm.tokenizer, texts, 6, tmp_path)
    # Another process that answers the same texts has a temporary name of its own.
    [file] = tmp_path.iterdir()
    file.unlink()
    file.with_name(f".{file.name}.part").mkdir()
    assert model_answers(lm.model, lm.tokenizer, texts, 6, tmp_path) == written
    assert [answer.text for answer in written] == [one.text.strip() for one in lm.generate(texts, 6)]
    monkeypatch.setattr("gerund.training.corpus.teachers.generate", None)
    assert model_answers(lm.model, lm.tokenizer, texts, 6, tmp_path) == written
    with pytest.raises(TypeError):
        model_answers(lm.model, lm.tokenizer, texts, 7, tmp_path)


def test_a_chat_template_is_used_where_there_is_one(base, tmp_path):
    lm = gerund.load(base, attention="causal", dtype="float32")
    lm.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} river{% endfor %}"
    [chat] = model_answers(lm.model, lm.tokenizer, ["the cat"], 6, tmp_path)
    assert chat.text == lm.generate("the cat river", 6)[0].text.strip()


@pytest.mark.slow
def test_texts_of_the_sources_are_answered_and_empty_answers_left_out(run, settings, corpus, monkeypatch, capsys):
    settings["data"] |= {"folder": str(corpus), "sources": [{"name": "a", "files": ["a.train.jsonl"], "limit": 2}]}
    settings["objectives"][0] |= {"files": [], "validation": []}
    answered = []

    def answer(model, tokenizer, texts, most, folder, report):
        del model, tokenizer, most, folder, report
        answered.extend(texts)
        return [Answer("" if number % 2 else "the dog") for number in range(len(texts))]

    monkeypatch.setattr("gerund.training.objectives.gen.model_answers", answer)
    run("out", "steps=1")
    assert len(answered) > 20
    assert f"{len(answered) // 2} texts are left out" in capsys.readouterr().err
    monkeypatch.setattr("gerund.training.objectives.gen.model_answers", lambda *given: [Answer("")] * len(given[2]))
    with pytest.raises(DataError, match="answers none of these texts"):
        run("other", "steps=2")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"query": "a"}', "no field 'text'"),
        ('{"text": " "}', "may not be empty"),
        ('{"text": "a", "answer": ""}', "may not be empty"),
        ('{"text": 1}', "is not a text"),
        ("", "no texts in there"),
    ],
)
def test_broken_texts(tmp_path, line, words):
    (tmp_path / "texts.jsonl").write_text(f"\ufeff{line}\n", "utf-8")
    with pytest.raises(DataError, match=words):
        read_texts([tmp_path / "texts.jsonl"])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["objectives.gen.read=5"], "read 5 is above tokens 4"),
        (["objectives.gen.mse=0", "objectives.gen.reconstruction=0"], "nothing is learned"),
        (["model.lora={rank: 2}"], "no model.lora"),
        (["encoder.attention=bidir"], "set encoder.attention to causal"),
        (["encoder.pooling=last"], "encoder.pooling to mean"),
        (["sharding=fsdp2"], "takes no sharding"),
        (["model.base=default"], "set model.adapter to none"),
    ],
)
def test_impossible_recipes(settings, write_recipe, overrides, words):
    with pytest.raises(ConfigError, match=words):
        train(load_recipe(write_recipe(settings), overrides))


@pytest.mark.slow
def test_an_encoder_decoder_is_refused(settings, write_recipe, tmp_path):
    save_tiny_t5(tmp_path / "t5")
    with pytest.raises(ConfigError, match="gen is for decoder-only models"):
        train(load_recipe(write_recipe(settings), [f"model.base={tmp_path / 't5'}", "encoder={attention: bidir}"]))
