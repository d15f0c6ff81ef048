"""Contrastive losses one pair at a time, vectors that are those of encode, what is no negative; SimCSE's dropout."""

import copy
import json
import random
import re

import pytest
import torch
from torch import nn

from gerund import LanguageModel
from gerund.attention.interface import attach
from gerund.errors import ConfigError
from gerund.inference.encode.runtime import EncoderRuntime
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.training.corpus.pairs import Example, Examples
from gerund.training.corpus.tokenizer import InputFormatter
from gerund.training.estimate import RandomTexts
from gerund.training.losses import vectors as by_length
from gerund.training.losses.vectors import dropout_settings
from gerund.training.objectives.base import prepare_objectives, split_rows
from gerund.training.objectives.contrastive import ContrastiveLosses, ExampleBatches, SimcseBatches, TextGroup
from gerund.training.recipe import load_recipe
from gerund.training.trainable_model import prepare_model
from tests.tiny import CONFIGS, N_LAYERS, VOCAB, tiny
from tests.training.conftest import WORDS
from tests.training.objectives import slow
from tests.training.objectives.conftest import Rows, assert_equal_losses, assert_same_rows, doubled

ENCODERS = {
    "unimae": EncoderConfig(attention=AttentionPlan("causal"), pooling="last", append_eos=True),
    "magnet": EncoderConfig(attention=AttentionPlan("bidir"), pooling="last", prompt="Find: ", append_eos=True),
    "mean": EncoderConfig(attention=AttentionPlan("bidir"), pooling="mean"),
    "mask0": EncoderConfig(attention=AttentionPlan("mask0-bidir", k=1), pooling="weighted-mean"),
    "prompt": EncoderConfig(attention=AttentionPlan("mask0-all", k=1), pooling="mean", prompt="the "),
    "pooled-prompt": EncoderConfig(attention=AttentionPlan("causal"), pooling="first", prompt="a: ", pool_prompt=True),
}
TEXTS = ["the cat", "a small dog runs", "cat", "The house sleeps under the red river.", "blue. " * 6, "x"]


def words(seed, count):
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS, k=count))


def runtime_of(model, tokenizer, encoder):
    plan = encoder.attention.resolve(2)
    return EncoderRuntime(model, tokenizer, encoder, plan, sends_plan=not plan.is_causal)


def formatter_of(tokenizer, encoder, prompt=None):
    return InputFormatter(tokenizer, prompt=encoder.prompt if prompt is None else prompt, append_eos=encoder.append_eos)


def slow_vector(eager, text, encoder):
    """Encode one formatted text; its prompt counts as its special tokens do, only where no plan hides them."""
    has_prompt = text.text_from > text.specials_before
    skips = not encoder.pool_prompt and (has_prompt or encoder.attention.name.startswith("mask0"))
    return slow.vector(eager, text.ids, text.text_from if skips else 0, encoder.attention, encoder.pooling)


EXAMPLES = [
    Example("the cat", "a cat sleeps", ("a dog runs", "red")),
    Example("a small dog", "the dog runs", ("the cat", "blue house")),  # a negative that is another's query
    Example("the river", "a cat sleeps", ("stone", "a dog runs")),  # a positive twice, a negative twice
    Example("red", "red stone", ("the river is blue and large", "x")),  # a query that is another's negative
    Example("the cat", "the large cat", ("the dog runs", "under the house")),  # a query twice, a positive as negative
    Example("blue", "blue", ("but", "with")),  # its own positive
]


@pytest.mark.sweep(quick=5, check=5)
@pytest.mark.parametrize("min_tokens", [1, 512], ids=["by-length", "one-pass"])
@pytest.mark.parametrize("hard_negatives", [0, 1, 2])
@pytest.mark.parametrize("name", ["unimae", "magnet", "mask0"])
@pytest.mark.parametrize("similarity, temperature, projection", [("cosine", 0.05, None), ("dot", 3.0, 5)])
def test_equals_one_pair_at_a_time(
    model, eager, tokenizer, double, monkeypatch, name, similarity, temperature, projection, hard_negatives, min_tokens
):
    monkeypatch.setattr(by_length, "_CPU_TOKENS", min_tokens)
    passes = []
    model.base_model.register_forward_hook(lambda *call: passes.append(call[2].last_hidden_state.shape[:2]))
    encoder = ENCODERS[name]
    runtime = runtime_of(model, tokenizer, encoder)
    examples = Examples(EXAMPLES, seed=1, hard_negatives=hard_negatives)
    prompts = ("ask: ", "") if name == "unimae" else (encoder.prompt, encoder.prompt)
    queries, documents = (formatter_of(tokenizer, encoder, prompt) for prompt in prompts)
    batch = ExampleBatches(examples, queries, documents, TextGroup(runtime, 2), length=40).make(0, 0, 6)
    torch.manual_seed(2)
    losses = doubled(ContrastiveLosses(runtime, temperature=temperature, similarity=similarity, projection=projection))
    vectors = torch.cat([losses(model, group) for group in batch.values()])
    assert vectors.dtype == torch.float64
    if min_tokens == 1:
        assert len(passes) > len(batch)
        assert passes[-1][0] > 1
    else:
        assert passes == [group["real"].shape for group in batch.values()]
    loss, right = losses.compare(vectors, batch, gather=False)

    rows = [examples.row(number) for number in range(6)]
    texts = {
        "query": [row.query for row in rows],
        "positive": [row.positive for row in rows],
        "negative": [text for row in rows for text in row.negatives],
    }
    assert list(batch) == [group for group in texts if texts[group]]
    formatted = {group: [(queries if group == "query" else documents).format_text(text, 40) for text in texts[group]]
              for group in texts}  # fmt: skip
    own = {group: [slow_vector(eager, text, encoder) for text in formatted[group]] for group in texts}
    if projection:
        own = {group: [losses.projection.weight @ vector for vector in own[group]] for group in own}
    names = texts["positive"] + texts["negative"]
    total, hits = slow.contrast(
        own["query"],
        own["positive"] + own["negative"],
        range(6),
        lambda i, j: names[j] in (texts["positive"][i], texts["query"][i]),
        temperature,
        similarity,
    )
    heads = [losses.projection] if projection else []
    assert_equal_losses({"it": loss}, {"it": total / 6}, model, eager, heads)
    assert right == hits


@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_are_those_of_encode(model, tokenizer, name):
    """The text's own tokens of the language model's encoder, whatever the other texts' lengths."""
    encoder = ENCODERS[name]
    model.eval()
    lm = LanguageModel(model, tokenizer, encoder)
    formatter = formatter_of(tokenizer, encoder)
    losses = ContrastiveLosses(lm.runtime, temperature=1.0, similarity="cosine")
    vectors = losses(model, TextGroup(lm.runtime, 2)([formatter.format_text(text, 60) for text in TEXTS]))
    encoded = lm.encode(TEXTS, normalize=False, output="torch")
    torch.testing.assert_close(vectors, encoded, rtol=1e-6, atol=1e-6)
    for text, vector in zip(TEXTS, encoded, strict=True):
        alone = losses(model, TextGroup(lm.runtime, 2)([formatter.format_text(text, 60)]))[0]
        assert torch.equal(alone, lm.encode(text, normalize=False, output="torch"))
        torch.testing.assert_close(alone, vector, rtol=1e-6, atol=1e-6)


def test_autocast_does_not_round_the_pooling(model, tokenizer):
    """In bfloat16, vectors would be told apart by their last three decimal digits less."""
    model = copy.deepcopy(model).float()
    encoder = ENCODERS["mean"]
    runtime, formatter = runtime_of(model, tokenizer, encoder), formatter_of(tokenizer, encoder)
    batch = TextGroup(runtime, 2)([formatter.format_text(text, 60) for text in TEXTS])
    losses = ContrastiveLosses(runtime, temperature=1.0, similarity="cosine", projection=5)
    kept = []
    handle = model.base_model.register_forward_hook(lambda *call: kept.append(call[2].last_hidden_state))
    with torch.autocast("cpu", torch.bfloat16):
        vectors = losses(model, batch)
    handle.remove()
    for row, vector in enumerate(vectors):
        mean = kept[0][row, : int(batch["real"][row].sum())].float().mean(dim=0)
        torch.testing.assert_close(vector, losses.projection.weight @ mean, rtol=1e-5, atol=1e-5)


class TestIdentity:
    def group(self, model, tokenizer):
        return TextGroup(runtime_of(model, tokenizer, ENCODERS["mean"]), 2)

    @pytest.mark.parametrize("prompt", ["", "Query: ", "Query:", "x\n"])
    @pytest.mark.parametrize("eos", [False, True])
    def test_a_text_is_the_same_behind_any_prompt(self, model, tokenizer, prompt, eos):
        group = self.group(model, tokenizer)
        plain = group([InputFormatter(tokenizer).format_text(text, 60) for text in TEXTS])["identity"]
        formatter = InputFormatter(tokenizer, prompt=prompt, append_eos=eos)
        assert group([formatter.format_text(text, 60) for text in TEXTS])["identity"].tolist() == plain.tolist()
        assert len(set(plain.tolist())) == len(TEXTS)

    def test_other_texts_are_others(self, model, tokenizer):
        texts = [words(seed, 1 + seed % 4) for seed in range(300)] + ["The cat", "the  cat", "the cat."]
        group = self.group(model, tokenizer)
        found = group([InputFormatter(tokenizer).format_text(text, 60) for text in texts])["identity"].tolist()
        assert len(set(found)) == len(set(texts))

    def test_it_is_the_same_in_every_process(self, model, tokenizer):
        """Numbers of other processes are compared, so Python's own hash would not do."""
        group = self.group(model, tokenizer)
        assert group([InputFormatter(tokenizer).format_text("the cat", 60)])["identity"].tolist() == [
            3042635075010022360
        ]


def test_simcse_has_every_text_twice(model, tokenizer, ids_of):
    rows, encoder = ids_of(8, 12, 20, 9, 30), ENCODERS["mean"]
    group = TextGroup(runtime_of(model, tokenizer, encoder), 2)
    batches = SimcseBatches(Rows(rows, skipped=5), formatter_of(tokenizer, encoder), group)
    batch = batches.make(0, 0, 5)
    assert list(batch) == ["query", "positive"]
    for name, tensor in batch["query"].items():
        assert torch.equal(tensor, batch["positive"][name])
    for row, text in enumerate(slow.texts_of(batch["query"])):
        assert text["input_ids"] == [tokenizer.bos_token_id, *rows[row]]
    for first, count in [(0, 5), (1, 2), (4, 1)]:
        assert_same_rows(batch["query"], first, batches.make(3, first, count)["query"])
    assert batches.skipped == 5


def test_examples_depend_on_nothing_but_their_numbers(model, tokenizer):
    encoder = ENCODERS["magnet"]
    group, formatter = TextGroup(runtime_of(model, tokenizer, encoder), 2), formatter_of(tokenizer, encoder)

    def make(step, first, count):
        examples = Examples(EXAMPLES, seed=1, hard_negatives=2)
        return ExampleBatches(examples, formatter, formatter, group, length=40).make(step, first, count)

    whole = make(0, 3, 8)
    for first, count in [(3, 8), (3, 1), (6, 5), (10, 1)]:
        part = make(4, first, count)
        for name, rows in part.items():
            assert len(rows["real"]) == count * (2 if name == "negative" else 1)
            assert_same_rows(whole[name], (first - 3) * (2 if name == "negative" else 1), rows)
    assert [len(part["real"]) for part in split_rows(whole["negative"], 5)] == [5, 5, 5, 1]


class TestTasks:
    """Instructions and batches of one task each (UniMAE, Appendix D, by BGE-ICL's settings)."""

    ASKED = {"nli": "Find the same.", "qa": "Find an answer.", "none": ""}  # noqa: RUF012

    def prepared(self, settings, write_recipe, tmp_path, pairs=None, **more):
        for task, prompt in self.ASKED.items():
            rows = [{"query": f"{task} q{n}", "pos": [f"{task} p{n}"], "prompt": prompt} for n in range(8)]
            (tmp_path / f"{task}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = [str(tmp_path / f"{task}.jsonl") for task in self.ASKED]
        objective = {
            "kind": "contrastive",
            "pairs": {"files": files, "positive": "pos", **(pairs or {})},
            "batch_size": 4,
            "length": 64,
            **more,
        }
        changed = {**settings, "objectives": [objective], "output": str(tmp_path / "out")}
        recipe = load_recipe(write_recipe(changed))
        model = prepare_model(recipe, write=False)
        [prepared] = prepare_objectives(recipe, model, RandomTexts(model.vocabulary))
        return model.tokenizer, prepared.batches

    @staticmethod
    def texts(tokenizer, group):
        return [tokenizer.decode(ids[real], skip_special_tokens=True)
                for ids, real in zip(group["input_ids"], group["real"], strict=True)]  # fmt: skip

    def test_every_query_has_its_own_instruction(self, settings, write_recipe, tmp_path):
        more = {"query_prompt": "<instruct>{instruction}\n<query>", "document_prompt": "", "same_task": True}
        tokenizer, batches = self.prepared(settings, write_recipe, tmp_path, {"instruction": "prompt"}, **more)
        seen = set()
        for step in range(6):
            batch = batches.make(step, 4 * step, 4)
            queries, documents = (self.texts(tokenizer, batch[name]) for name in ("query", "positive"))
            [task] = {document.strip().split()[0] for document in documents}
            asked = f"<instruct>{self.ASKED[task]}\n<query>" if self.ASKED[task] else ""
            for query, document in zip(queries, documents, strict=True):
                assert query.strip() == f"{asked}{document.strip().replace(' p', ' q')}"
            # What is pooled and compared is the query alone.
            plain = batches.group.identities([document.strip().replace(" p", " q") for document in documents])
            assert batch["query"]["identity"].tolist() == plain.tolist()
            seen.add(task)
        assert seen == set(self.ASKED)

    def test_batches_are_mixed_otherwise(self, settings, write_recipe, tmp_path):
        tokenizer, batches = self.prepared(settings, write_recipe, tmp_path)
        tasks = {text.strip().split()[0] for text in self.texts(tokenizer, batches.make(0, 0, 4)["query"])}
        assert len(tasks) > 1

    def test_tasks_by_a_column(self, settings, write_recipe, tmp_path):
        pairs = {"task": "prompt", "files": [str(tmp_path / "nli.jsonl"), str(tmp_path / "qa.jsonl")]}
        tokenizer, batches = self.prepared(settings, write_recipe, tmp_path, pairs, same_task=True)
        for step in range(4):
            texts = self.texts(tokenizer, batches.make(step, 4 * step, 4)["query"])
            assert len({text.strip().split()[0] for text in texts}) == 1

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"query_prompt": "{instruction} "}, "query_prompt has the place {instruction} where pairs.instruction"),
            ({"pairs": {"instruction": "prompt"}}, "query_prompt has the place {instruction} where pairs.instruction"),
            ({"pairs": {"task": "prompt"}}, "pairs.task names tasks for same_task: true"),
            (
                {"pairs": {"instruction": "prompt"}, "query_prompt": "a b " * 40 + "{instruction}"},
                "length 64 leaves no room for text",
            ),
        ],
    )
    def test_mistakes(self, settings, write_recipe, tmp_path, changes, message):
        with pytest.raises(ConfigError, match=re.escape(message)):
            self.prepared(settings, write_recipe, tmp_path, **changes)


# Other dropouts than that of the probabilities.
OTHERS = {"gpt2": {"embd_pdrop": 0.0, "resid_pdrop": 0.0}, "opt": {"dropout": 0.0}}


def case(name, dropout):
    model = tiny(name, **OTHERS.get(name, {})).train()
    attach(model)
    encoder = EncoderConfig(attention=AttentionPlan("bidir"))
    runtime = EncoderRuntime(model, None, encoder, encoder.attention.resolve(N_LAYERS))
    losses = ContrastiveLosses(runtime, temperature=1.0, similarity="cosine", dropout=dropout)
    ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(ids).bool()
    return model, losses, {"input_ids": ids, "real": real, "pooled": real}


def rates(model):
    return [getattr(*place) for place in dropout_settings(model)]


@pytest.mark.sweep(quick=4, check=4)
@pytest.mark.parametrize("name", CONFIGS)
def test_every_layer_of_every_architecture(name):
    model, losses, part = case(name, 0.3)
    before = rates(model)
    assert len(before) == N_LAYERS
    everything = {key: module.p for key, module in model.named_modules() if isinstance(module, nn.Dropout)}
    torch.manual_seed(0)
    with torch.no_grad(), losses.heads.during(model):
        assert rates(model) == [0.3] * N_LAYERS
        one, other = losses(model, part), losses(model, part)
        assert not torch.allclose(one, other, rtol=1e-3)
        model.eval()
        assert torch.equal(losses(model, part), losses(model, part))
    assert rates(model) == before
    assert everything == {key: module.p for key, module in model.named_modules() if isinstance(module, nn.Dropout)}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_single_layer_that_drops_shows(name):
    """Every place is one that the attention reads: in each layer alone it makes two passes differ."""
    model, losses, part = case(name, 0.0)
    with torch.no_grad(), losses.heads.during(model):
        for module, attribute in dropout_settings(model):
            setattr(module, attribute, 0.4)
            assert not torch.equal(losses(model, part), losses(model, part))
            setattr(module, attribute, 0.0)
            assert torch.equal(losses(model, part), losses(model, part))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_it_is_put_back_after_an_error(name):
    model, losses, _ = case(name, 0.3)
    for place, (module, attribute) in enumerate(dropout_settings(model)):
        setattr(module, attribute, 0.1 * place)
    before = rates(model)

    def fail():
        with losses.heads.during(model):
            assert rates(model) == [0.3] * N_LAYERS
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        fail()
    assert rates(model) == before


def test_the_models_own_dropout_is_left_alone():
    model, losses, part = case("gpt2", None)
    assert rates(model) == [0.1] * N_LAYERS  # GPT-2's default
    with torch.no_grad(), losses.heads.during(model):
        assert rates(model) == [0.1] * N_LAYERS
        assert not torch.equal(losses(model, part), losses(model, part))


def test_an_architecture_without_such_a_dropout(monkeypatch):
    monkeypatch.setattr("gerund.training.losses.vectors._DROPOUTS", ())
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no attention dropout to set; set dropout: 0 and give"):
        case("llama", 0.3)
    # What the message advises works.
    model, losses, part = case("llama", 0.0)
    with torch.no_grad(), losses.heads.during(model):
        assert torch.equal(losses(model, part), losses(model, part))
