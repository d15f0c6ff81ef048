"""Methods without training against the slow obvious way: plain transformers, one text at a time, layers run by hand."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv

import gerund
from gerund import AttentionPlan, ConfigError, EncoderConfig, TextError, UnsupportedModelError
from gerund.attention.interface import FUSED
from gerund.attention.masks import visible
from gerund.inference.encode.kv_embedding_layers import chosen_layers, intrinsic_dimension
from gerund.inference.encode.runtime import placeholder_embedding
from gerund.inference.encode.texts import text_tokens
from gerund.language_model import LanguageModel
from gerund.models.saved_settings import saved_fields, settings_from
from gerund.settings.encoder import METHODS
from gerund.settings.model_spec import EncoderSpec, parse_encoder_spec
from gerund.settings.templates import rerouted_layers, settings_of_template, templates_of
from gerund.types import Rendered
from tests.tiny import byte_tokenizer, tiny_lm

TEXTS = ["A dog", 'is it a "cat"?', "the other thing.", "x"]
CAUSAL = AttentionPlan("causal")
NEAR = {"atol": 3e-5, "rtol": 1e-4}
ROOM = 900  # the templates of MetaEOL have some 400 bytes


def build(model_type: str = "llama", *, side: str = "right", **settings) -> LanguageModel:
    tokenizer = byte_tokenizer()
    tokenizer.padding_side, tokenizer.model_max_length = side, ROOM
    room = {"n_positions" if model_type == "gpt2" else "max_position_embeddings": ROOM}
    return tiny_lm(model_type, tokenizer, changes=room, **{"attention": CAUSAL, **settings})


def states_of(lm: LanguageModel, text: str) -> list[torch.Tensor]:
    """Every layer's states ``(T, D)`` of one text, as transformers gives them."""
    with torch.no_grad():
        output = lm.model(**lm.tokenizer(text, return_tensors="pt"), output_hidden_states=True)
    return [states[0] for states in output.hidden_states]


# The released code of PromptEOL and MetaEOL, written down again: what becomes of a sentence and where it stands.
def released_sentence(text: str) -> str:
    if text[-1] not in ".?\"'":
        text += "."
    text = text.replace('"', "'")
    return text[:-1] + "." if text[-1] == "?" else text


RELEASED = {
    "prompteol": 'This sentence : "*" means in one word:"',
    "prompteol-few-shot": (
        'This sentence : "A jockey riding a horse." means in one word:"Equestrian".'
        'This sentence : "*" means in one word:"'
    ),
    "prompteol-cot": 'After thinking step by step , this sentence : "*" means in one word:"',
    "prompteol-knowledge": (
        "The essence of a sentence is often captured by its main subjects and actions, while descriptive terms provide "
        'additional but less central details. With this in mind , this sentence : "*" means in one word:"'
    ),
}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", RELEASED)
def test_a_template_is_read_as_in_the_released_code(name: str, side: str) -> None:
    lm = build(side=side, template=name, **settings_of_template(name))
    layer = -2 if name in ("prompteol-cot", "prompteol-knowledge") else -1
    slow = [states_of(lm, RELEASED[name].replace("*", released_sentence(text)))[layer][-1] for text in TEXTS]
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow).numpy(), **NEAR)


@pytest.mark.slow
def test_metaeol_is_the_mean_over_eight_tasks() -> None:
    lm = build(template="metaeol", pooling="last")
    frames = templates_of("metaeol")
    assert len(frames) == 8
    assert all(one.before.startswith("In this task, you're ") for one in frames)
    assert all(one.before.endswith('this task, this sentence : "') for one in frames)
    assert all(one.after.startswith('" ') and one.after.endswith(' in one word:"') for one in frames)
    assert frames[1].after == '" discriminates between opinion and fact in one word:"'
    slow = [
        torch.stack([states_of(lm, one.before + released_sentence(text) + one.after)[-1][-1] for one in frames]).mean(0)
        for text in TEXTS
    ]
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow).numpy(), **NEAR)
    told = lm.encode_with_usage(TEXTS[:1])
    assert told.token_counts[0] == sum(len(lm.tokenizer(one.before + "A dog." + one.after).input_ids) for one in frames)
    with pytest.raises(ConfigError, match="reads a text 8 times; only encode can"):
        lm.encode_tokens(TEXTS)


@pytest.mark.parametrize("plan", ["causal", "mask0-bidir"])
def test_a_template_of_ones_own_is_not_pooled(plan: str) -> None:
    lm = build(attention=AttentionPlan(plan), template='Say "{text}" again', pooling="mean")
    alone = build(attention=AttentionPlan(plan), prompt='Say "', pooling="mean")
    whole = 'Say "the cat" again'
    [states] = alone.with_encoder(replace(alone.encoder, prompt="")).encode_tokens([whole])
    first = len(lm.tokenizer('Say "').input_ids)
    count = len(lm.tokenizer("the cat", add_special_tokens=False).input_ids)
    np.testing.assert_allclose(lm.encode("the cat", normalize=False), states[first : first + count].mean(0), **NEAR)
    [own] = lm.encode_tokens(["the cat"])
    np.testing.assert_allclose(own[1:], states[first : first + count], **NEAR)


def test_a_long_text_loses_its_own_end_and_not_that_of_the_template() -> None:
    lm = build(template="prompteol", pooling="last", max_length=80)
    with pytest.warns(UserWarning, match="were cut"):
        found = lm.encode("z" * 5000, normalize=False)
    ids = lm.tokenizer('This sentence : "' + "z" * 500).input_ids
    after = lm.tokenizer('" means in one word:"', add_special_tokens=False).input_ids
    with torch.no_grad():
        states = lm.model.base_model(torch.tensor([ids[: 80 - len(after)] + after])).last_hidden_state
    np.testing.assert_allclose(found, states[0, -1].numpy(), **NEAR)
    with pytest.raises(ConfigError, match="leaves no room for text"):
        build(template="prompteol", max_length=30).encode("z")


ECHOES = {"rewrite": "Rewrite the sentence: *, rewritten sentence: *", "A {text} | {text} Z": "A * | * Z"}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ECHOES)
def test_an_echo_template_pools_the_second_copy_alone(name: str, side: str) -> None:
    lm = build(side=side, attention=AttentionPlan("echo"), template=name)
    slow = []
    for text in TEXTS:
        whole = ECHOES[name].replace("*", text)
        states = states_of(lm, whole)[-1]
        last = len(whole) - len(ECHOES[name].rpartition("*")[2])
        places = lm.tokenizer(whole, return_offsets_mapping=True).offset_mapping
        # A token that holds any character of the copy is of it.
        slow.append(states[[last - len(text) < end and begin < last for begin, end in places]].mean(0))
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow).numpy(), **NEAR)


@pytest.mark.parametrize("length", [79, 80])
def test_both_copies_of_a_long_text_lose_as_much(length: int) -> None:
    lm = build(attention=AttentionPlan("echo"), template="A {text} | {text} Z", max_length=length)
    with pytest.warns(UserWarning, match="1 of 2 texts were longer than"):
        found = lm.encode(["y" * 20 + "z" * 5000, "a cat"], normalize=False)
    room = (length - len("A  |  Z") - 1) // 2
    own = ("y" * 20 + "z" * 5000)[:room]
    states = states_of(lm, f"A {own} | {own} Z")[-1]
    np.testing.assert_allclose(found[0], states[-2 - room : -2].mean(0).numpy(), **NEAR)
    whole, cut = "y" * room, "y" * (room + 1)
    assert lm.encode_with_usage([whole, cut]).truncated == [False, True]
    assert [len(text) for text in text_tokens(lm.runtime, [whole])] == [8 + 2 * room]
    with pytest.raises(TextError, match="tokens and there is room for"):
        lm.encode(cut, overflow="error")
    with pytest.raises(ConfigError, match="leaves no room for text"):
        build(attention=AttentionPlan("echo"), template="A {text} | {text} Z", max_length=9).encode("z")


def test_a_copy_has_the_tokens_of_its_place(bundled) -> None:
    """A tokenizer of words and pieces: what is pooled is told by characters."""
    lm = bundled.with_encoder(EncoderConfig(AttentionPlan("echo"), template="rewrite", max_length=40))
    with pytest.warns(UserWarning, match="were cut"):
        [tokens] = text_tokens(lm.runtime, ["The kitten sleeps. " * 30], offsets=True)
    assert 36 <= len(tokens) <= 40
    text = lm.tokenizer.decode(tokens.ids)
    before, _, behind = text.partition(", rewritten sentence: ")
    assert before.endswith(behind)
    assert lm.tokenizer.decode(tokens.ids[tokens.text_from :]).strip() == behind.strip()
    assert ("The kitten sleeps. " * 30)[tokens.offsets[0][0] :][:57] == "The kitten sleeps. " * 3


def test_a_prompt_with_the_text_in_it_takes_the_place_of_the_template() -> None:
    lm = build(template="prompteol", pooling="last", prompts={"query": 'Ask "{text}" now', "plain": "Topic! "})
    slow = states_of(lm, 'Ask "A dog" now')[-1][-1].numpy()
    for said in ({"prompt_name": "query"}, {"prompt": 'Ask "{text}" now'}):
        np.testing.assert_allclose(lm.encode("A dog", **said, normalize=False), slow, **NEAR)
    slow = states_of(lm, 'Topic! This sentence : "A dog." means in one word:"')[-1][-1].numpy()
    np.testing.assert_allclose(lm.encode("A dog", prompt_name="plain", normalize=False), slow, **NEAR)
    with pytest.raises(ConfigError, match="text after the placeholder"):
        build().encode_and_prefill("A dog", prompt='Ask "{text}"')
    with pytest.raises(ConfigError, match="training takes no template and no prompt with a place for the text"):
        lm.encoder.refuse_methods("training")


def test_kv_embedding_reads_queries_in_a_template_of_their_own() -> None:
    spec = EncoderSpec(attention="causal", template="kv-embedding")
    own = EncoderConfig(prompts={"query": "Q: ", "document": "D: "})
    found = spec.applied_to(own)
    assert found.prompts == {"query": "Query: {text} Compress the Query in one word:", "document": "D: "}
    assert EncoderSpec(attention="causal", template="kv-embedding", prompts={}).applied_to(own).prompts == {}
    assert EncoderSpec(template="none").applied_to(found).prompts == {"document": "D: "}
    assert EncoderSpec(prompt="Read: ").applied_to(found).prompts == found.prompts
    lm = build(**settings_of_template("kv-embedding"), template="kv-embedding")
    states = states_of(lm, "Query: a cat Compress the Query in one word:")[-1]
    slow = (states[-1] + states.mean(0)) / 2
    np.testing.assert_allclose(lm.encode("a cat", prompt_name="query", normalize=False), slow.numpy(), **NEAR)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "gemma2", "mistral"])
@pytest.mark.parametrize(
    ("layers", "wanted"), [("3", [3]), ("0+2-4", [0, 2, 3, 4]), ("all", [1, 2, 3, 4]), ("1+4", [1, 4]), ("last", [4])]
)
def test_mixed_layers_are_the_mean_of_hidden_states(layers: str, wanted: list[int], model_type: str) -> None:
    lm = build(model_type, side="left", layers=layers)
    slow = []
    for text in TEXTS:
        states = states_of(lm, text)
        slow.append(torch.stack([states[layer] for layer in wanted]).mean(0).mean(0))
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow).numpy(), **NEAR)


def test_layers_of_a_plan_are_those_that_it_computes() -> None:
    """Each layer's state of a plan with skips, off a pass whose hook notes what every layer is called with."""
    plan = AttentionPlan("mask0-bidir", k=2, skips=1)
    lm = build(attention=plan, layers="2-3")
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
        )
        for layer in lm.model.base_model.layers
    ]
    found = lm.encode("the cat", normalize=False)
    for hook in hooks:
        hook.remove()
    np.testing.assert_allclose(found, ((seen[2] + seen[3]) / 2)[0, 1:].mean(0).numpy(), atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("below", [2, 3, 4])
def test_prepending_equals_layers_run_by_hand(below: int, side: str) -> None:
    """Token Prepending's released code: below the exiting layer, the last state goes to the placeholder."""
    lm = build(side=side, template="prompteol", pooling="last", prepend=below)
    body = lm.model.base_model
    slow = []
    for text in TEXTS:
        before = lm.tokenizer("This sentence :").input_ids
        after = lm.tokenizer(f' "{released_sentence(text)}" means in one word:"', add_special_tokens=False).input_ids
        ids = torch.tensor([[*before, 0, *after]])
        with torch.no_grad():
            hidden = body.embed_tokens(ids)
            hidden[0, len(before)] = placeholder_embedding(hidden.shape[-1])
            length = ids.shape[1]
            position = torch.arange(length)[None]
            rotary = body.rotary_emb(hidden, position)
            mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
            for index, layer in enumerate(body.layers):
                if 1 <= index < below:
                    hidden[0, len(before)] = hidden[0, -1]
                output = layer(hidden, attention_mask=mask, position_ids=position, position_embeddings=rotary)
                hidden = (output[0] if isinstance(output, tuple) else output).clone()
            slow.append(body.norm(hidden)[0, -1])
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow).numpy(), **NEAR)


def test_a_method_leaves_generation_alone(tiny_folder) -> None:
    plain = gerund.load(tiny_folder, attention="causal")
    lm = gerund.load(tiny_folder, attention="causal", template="prompteol", layers="2-4", prepend=2)
    assert lm.generate("the cat", 8)[0].text == plain.generate("the cat", 8)[0].text
    scores = [one.score(["the cat"], [[" sat", " in"]], "avg_cll") for one in (lm, plain)]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("plan", ["causal", "mask0-bidir", "bidir"])
@pytest.mark.parametrize(("rule", "first"), [("never", 1), ("always", 0)])
def test_whether_special_tokens_are_pooled_is_one_rule_for_all_plans(plan: str, rule: str, first: int) -> None:
    lm = build(attention=AttentionPlan(plan), pool_bos=rule)
    [states] = lm.encode_tokens(["the cat"])
    np.testing.assert_allclose(lm.encode("the cat", normalize=False), states[first:].mean(0), atol=1e-5)
    prompted = lm.encode("the cat", prompt="So: ", normalize=False)
    usual = build(attention=AttentionPlan(plan)).encode("the cat", prompt="So: ", normalize=False)
    np.testing.assert_array_equal(prompted, usual)


def test_left_to_itself_a_plan_that_hides_the_first_token_does_not_pool_it() -> None:
    for plan, rule in (("causal", "always"), ("mask0-bidir", "never")):
        lm, told = build(attention=AttentionPlan(plan)), build(attention=AttentionPlan(plan), pool_bos=rule)
        np.testing.assert_array_equal(lm.encode(TEXTS), told.encode(TEXTS))


def test_settings_that_are_left_alone_are_neither_written_nor_hashed() -> None:
    config = EncoderConfig()
    assert config.methods == []
    assert not {"template", "layers", "prepend", "transform", "pool_bos"} & set(config.to_dict())
    changed = [
        build(template="prompteol"),
        build(template="prompteol", prepend=2),
        build(layers="3"),
        build(pool_bos="never"),
        build(),
    ]
    assert len({lm.fingerprint() for lm in changed}) == len(changed)
    for lm in changed:
        saved = saved_fields(EncoderSpec.of_config(lm.encoder, 4))
        assert lm.encoder.methods == [name for name in METHODS if name in saved]
        assert settings_from(saved).applied_to(EncoderConfig()) == lm.encoder.with_defaults(4)


def test_a_named_template_brings_its_pooling(tiny_folder) -> None:
    assert gerund.load(tiny_folder, attention="causal", template="prompteol").encoder.pooling == "last"
    assert gerund.load(tiny_folder, attention="causal", template="prompteol", pooling="mean").encoder.pooling == "mean"
    assert gerund.load(tiny_folder, attention="causal", template="Say {text}!").encoder.pooling == "mean"
    lm = gerund.load(tiny_folder, attention="causal", template="kv-embedding", reroute="2-3")
    assert (lm.encoder.pooling, lm.encoder.pool_prompt, lm.encoder.reroute) == ("last-mean", True, "2-3")
    said = parse_encoder_spec("causal:template=kv-embedding,pooling=mean,pool_prompt=false").applied_to(lm.encoder)
    assert (said.pooling, said.pool_prompt) == ("mean", False)


@pytest.mark.parametrize("settings", [{"template": "prompteol-cot", "layers": "2-3"}, {"reroute": "2-3"}])
def test_a_saved_folder_and_a_spec_keep_the_method(tiny_folder, tmp_path, settings: dict) -> None:
    lm = gerund.load(tiny_folder, attention="causal", max_length=60, **settings)
    assert lm.fingerprint() != gerund.load(tiny_folder, attention="causal", max_length=60).fingerprint()
    lm.save(tmp_path / "saved")
    for again in (gerund.load(tmp_path / "saved"), gerund.load(lm.spec)):
        assert again.encoder == lm.encoder.with_defaults(4) or again.encoder == lm.encoder
        assert again.fingerprint() == lm.fingerprint()
        assert {name: getattr(again.spec, name) for name in settings} == settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"template": "prompt-eol"}, "unknown template 'prompt-eol'"),
        ({"template": "{text} and {text} and {text}"}, "more than twice"),
        ({"template": "{text} and {text}"}, "a template with {text} twice is for attention='echo'"),
        ({"prompts": {"query": "{text} and {text}"}}, "a template with {text} twice is for attention='echo'"),
        ({"prompts": {"query": "Q: {text}"}, "attention": "echo"}, "its templates have {text} twice"),
        ({"layers": "9"}, "layers=9: the model has 4 layers"),
        ({"layers": "4-2"}, "runs backwards"),
        ({"layers": "-0"}, "none of last, all, 6, -2, 4-8"),
        ({"prepend": 3}, "prepend puts a token into a template"),
        ({"prepend": 5, "template": "prompteol"}, "prepend=5: the model has 4 layers"),
        ({"reroute": "2", "attention": "bidir", "skips": 1}, "reroute and skips do not go together"),
        ({"reroute": "2", "attention": "inter-back"}, "for plans that run each layer once, not for"),
        ({"reroute": "9"}, "reroute=9: the model has 4 layers"),
        ({"reroute": "0-2"}, "layers are counted from 1"),
        ({"reroute": "middle"}, "none of none, all, 6, 4-8 and 1"),
        ({"prepend": 1, "template": "prompteol"}, "the first layer that can take a state over is the second one"),
        (
            {"prepend": 2, "template": "prompteol", "attention": "inter-back"},
            "for plans that run each layer once, not for",
        ),
        ({"template": "prompteol", "attention": "echo"}, "its templates have {text} twice"),
        ({"states": "values", "attention": "inter-back"}, "states=values is for plans that run each layer once"),
        ({"states": "values", "layers": "0+2"}, "0 are the embeddings, which have no values"),
        ({"states": "keys"}, "unknown states 'keys'"),
        ({"generated": 4}, "generated is for attention='causal'"),
        ({"generated": 4, "attention": "causal", "layers": "2"}, "generated and layers do not go together"),
        ({"transform": "bleaching"}, "unknown transform 'bleaching'"),
        ({"pool_bos": "maybe"}, "unknown pool_bos 'maybe'"),
    ],
)
def test_what_cannot_be_is_one_sentence(tiny_folder, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        gerund.load(tiny_folder, **settings)


def test_what_knows_nothing_of_methods_refuses_them(tiny_folder, tmp_path) -> None:
    lm = gerund.load(tiny_folder, attention="causal", layers="2-3")
    with pytest.raises(ConfigError, match="an export as merged takes no layers"):
        lm.export(tmp_path / "out", "merged")
    with pytest.raises(ConfigError, match="takes no layers"):
        lm.encode_and_prefill("the cat")
    with pytest.raises(TextError, match="is rendered and takes no prompt"):
        gerund.load(tiny_folder, template="prompteol", max_length=60).encode(Rendered("<s>the cat"))


def by_hand(lm: LanguageModel, text: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values ``(T, D)`` of a Llama's or GPT-2's layer, and its attention's output, from the formula."""
    config, ids = lm.model.config, lm.tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        before = lm.model(**ids, output_hidden_states=True).hidden_states[layer - 1]
        output = lm.model(**ids, output_attentions=True)
        block = lm.model.base_model.layers[layer - 1]
        values = block.self_attn.v_proj(block.input_layernorm(before))[0]
        heads, kept = config.num_attention_heads, config.num_key_value_heads
        own = values.view(len(values), kept, -1).repeat_interleave(heads // kept, dim=1)
        weighted = torch.einsum("hqk,khd->qhd", output.attentions[layer - 1][0], own)
        return values, block.self_attn.o_proj(weighted.flatten(1))


@pytest.mark.parametrize("side", ["left", "right"])
def test_values_and_attention_equal_the_formula(side: str) -> None:
    lm = build(side=side)
    lm.model.set_attn_implementation("eager")
    slow = [[by_hand(lm, text, layer) for layer in (2, 4)] for text in TEXTS]
    lm = build(side=side)
    pooled = lm.with_encoder(replace(lm.encoder, states="values", layers="2+4"))
    wanted = [torch.stack([values.mean(0) for values, _ in own]).mean(0) for own in slow]
    np.testing.assert_allclose(pooled.encode(TEXTS, normalize=False), torch.stack(wanted), **NEAR)
    assert pooled.dimensions == len(wanted[0])
    aligned = lm.with_encoder(replace(lm.encoder, states="attention", layers="4", pooling="last"))
    wanted = [own[1][1][-1] for own in slow]
    np.testing.assert_allclose(aligned.encode(TEXTS, normalize=False), torch.stack(wanted), **NEAR)


@pytest.mark.parametrize("model_type", ["gemma3_text", "gpt2", "gpt_neox", "opt", "qwen3"])
@pytest.mark.parametrize("states", ["values", "attention"])
def test_architectures_give_values_and_attention(model_type: str, states: str) -> None:
    lm = build(model_type, states=states, layers="all")
    found = lm.encode(["A dog sat down.", "x"], normalize=False)
    assert found.shape == (2, lm.dimensions)
    # Alone and in a batch with padding.
    np.testing.assert_allclose(lm.encode(["x"], normalize=False)[0], found[1], **NEAR)


@pytest.mark.parametrize("template", ["none", "prompteol"])
def test_generated_states_are_those_of_the_greedy_continuation(template: str) -> None:
    lm = build(template=template, generated=3)
    ends, slow = {lm.tokenizer.eos_token_id}, []
    for text in text_tokens(lm.runtime, TEXTS):
        ids = list(text.ids)
        with torch.no_grad():
            for _ in range(3):
                logits = lm.model(torch.tensor([ids])).logits[0, -1]
                logits[list(ends)] = -torch.inf
                ids.append(int(logits.argmax()))
            output = lm.model(torch.tensor([ids]), output_hidden_states=True)
        slow.append(output.hidden_states[-1][0, -3:].mean(0))
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow), **NEAR)


def test_what_reads_no_text_tokens_says_so() -> None:
    with pytest.raises(ConfigError, match="generated is for vectors of whole texts"):
        build(generated=2).encode_tokens(["A dog"])
    with pytest.raises(UnsupportedModelError, match="recurrent layers"):
        build("mamba", generated=2).encode(["A dog"])
    with pytest.raises(UnsupportedModelError, match="layer 1, 2, 3, 4 of this mamba model has none that can"):
        build("mamba", states="values", layers="all").encode(["A dog"])


# ------------------------------------------------------------------------------------------------------- KV-Embedding

PROMPT = "Context: {} Compress the Context in one word:"


class Slow:
    """An attention function that puts the last key and value before the others, in some layers."""

    def __init__(self, layers: set[int], lm: LanguageModel) -> None:
        self.layers, self.lm = layers, lm

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        del attention_mask
        length, groups = query.shape[2], query.shape[1] // key.shape[1]
        keys, values = repeat_kv(key, groups), repeat_kv(value, groups)
        view = self.lm.runtime.plan.views[module.layer_idx]
        window = kwargs.get("sliding_window")
        see = visible(view, length, real_BT=None, span_BT=None, window=window, device=query.device)
        see = see.expand(1, 1, length, length)
        if module.layer_idx in self.layers:
            keys = torch.cat([keys[:, :, -1:], keys], dim=2)
            values = torch.cat([values[:, :, -1:], values], dim=2)
            see = torch.cat([torch.ones(1, 1, length, 1, dtype=torch.bool), see], dim=3)
        scores = query @ keys.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if module.layer_idx in self.layers:
            scores[..., 0] += 1.0
        weights = scores.masked_fill(~see, -torch.inf).softmax(dim=-1)
        return (weights @ values).transpose(1, 2).contiguous(), None


def slow_states(lm: LanguageModel, text: str, layers: set[int]) -> torch.Tensor:
    """The last hidden states ``(T, D)`` of one text."""
    assert lm.model.config._attn_implementation == FUSED
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, FUSED, Slow(layers, lm))
        return lm.model.base_model(**lm.tokenizer(text, return_tensors="pt")).last_hidden_state[0]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("reroute", ["3", "2-3", "all"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen3", "mistral"])
def test_rerouting_equals_a_key_put_before_the_text(model_type: str, reroute: str, side: str) -> None:
    lm = build(model_type, side=side, template="kv-embedding", pooling="last-mean", pool_prompt=True, reroute=reroute)
    layers = {number - 1 for number in rerouted_layers(reroute, 4)}
    slow = []
    for text in TEXTS:
        states = slow_states(lm, PROMPT.format(text), layers)
        slow.append((states[-1] + states.mean(0)) / 2)
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow).numpy(), **NEAR)
    plain = lm.with_encoder(replace(lm.encoder, reroute="none"))
    assert not np.allclose(lm.encode(TEXTS), plain.encode(TEXTS), atol=1e-3)


@pytest.mark.parametrize("plan", ["mask0-bidir", "inplace-back", "mask0-all"])
def test_under_another_plan_the_key_has_more_weight_where_it_is_seen_already(plan: str) -> None:
    lm = build(attention=AttentionPlan(plan), reroute="2-4", pooling="last")
    slow = [slow_states(lm, text, {1, 2, 3})[-1] for text in TEXTS]
    np.testing.assert_allclose(lm.encode(TEXTS, normalize=False), torch.stack(slow).numpy(), **NEAR)


@pytest.mark.parametrize("model_type", ["mpt", "bloom", "mamba"])
def test_what_cannot_be_rerouted_is_refused(model_type: str) -> None:
    lm = build(model_type)
    assert lm.encode("the cat").shape == (lm.dimensions,)
    message = "reroute is for attention|cannot have its last token's key before"
    with pytest.raises(UnsupportedModelError, match=message):
        lm.with_encoder(EncoderConfig(AttentionPlan("causal"), reroute="2")).encode("the cat")


def test_exact_where_attention_takes_a_mask() -> None:
    """GPT-J computes attention by itself: the mask of a rerouted layer is what it adds."""
    lm = build("gptj")
    lm = lm.with_encoder(EncoderConfig(AttentionPlan("causal"), reroute="all"))
    for text, one in zip(TEXTS, lm.encode_tokens(TEXTS), strict=True):
        np.testing.assert_allclose(one, lm.encode_tokens([text])[0], **NEAR)


def test_the_dimension_of_a_surface_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    for wanted in (1, 2, 5):
        flat = torch.randn(1500, wanted, generator=generator) @ torch.randn(wanted, 40, generator=generator)
        assert intrinsic_dimension(flat) == pytest.approx(wanted, rel=0.12)


def test_layers_are_those_of_the_lowest_dimension(tiny_folder) -> None:
    assert chosen_layers([9.0, 8, 7, 6, 5, 4, 3, 2, 3, 4]) == [8, 9]
    assert chosen_layers([1.0, 9, 5, 9, 3, 9, 4, 9, 8, 9]) == [5, 7]  # not U-shaped: none of the first fifth
    lm = gerund.load(tiny_folder)
    texts = [f"{one} cat {other} the mat" for one in ("the", "a", "one", "my") for other in ("on", "by", "near")]
    chosen = lm.rerouting_layers(texts)
    assert set(rerouted_layers(chosen, 4)) <= {1, 2, 3, 4}
    assert chosen == lm.rerouting_layers(texts)
    with pytest.raises(gerund.DataError, match="too few to estimate a dimension"):
        lm.rerouting_layers(["a"])
