"""Vectors of words, found from a text's tokens: against words that are cut out of the text itself."""

import random
import re

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import gerund
from gerund.errors import ConfigError, DataError
from gerund.models.heads import ProjectionHead, WordVectors, read_head
from gerund.models.light_head import WEIGHTS_FILE, HeadConfig, read_light_head
from gerund.training.losses.distillation import StaticFit, fit_head, take_words

TEXTS = [
    "The Cameron hawkes flew over Über-lange words; the end.",
    "naïve CAFÉ 3.5 times, x2 and snake_case don't",
    "THE cameron HAWKES",
    "日本語 mixed in",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return gerund.load().tokenizer


@pytest.fixture(scope="module")
def words(tokenizer):
    found = WordVectors(len(tokenizer), 3, 4)
    found.read_tokens(tokenizer)
    return found


def read(tokenizer, texts):
    """Return tokens, and which of them are the texts' own."""
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    ids = torch.full((len(rows), max(map(len, rows)) + 1), tokenizer.pad_token_id)
    pooled = torch.zeros_like(ids, dtype=torch.bool)
    for number, row in enumerate(rows):
        ids[number, 1 : len(row) + 1] = torch.tensor(row, dtype=torch.int64)
        pooled[number, 1 : len(row) + 1] = True
    return ids, pooled


def keys_of(words, tokenizer, text):
    ids, pooled = read(tokenizer, [text])
    return words.words(ids, pooled)[1].tolist()


@pytest.mark.slow
def test_a_word_is_the_same_in_any_case_and_at_any_place(words, tokenizer):
    ids, pooled = read(tokenizer, TEXTS)
    text, keys = words.words(ids, pooled)
    of = {number: keys[text == number].tolist() for number in range(len(TEXTS))}
    assert of[2] == of[0][:3]
    assert of[0][0] == of[0][-2]
    assert not of[4]
    assert len(set(of[0])) == len(of[0]) - 1


def test_a_word_is_found_whatever_tokens_it_is_cut_into(words, tokenizer):
    letters = random.Random(0)
    for _ in range(200):
        word = "".join(letters.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(letters.randint(1, 14)))
        [key] = keys_of(words, tokenizer, word)
        assert keys_of(words, tokenizer, f"({word.upper()}), {word}") == [key, key]


def test_words_are_those_of_a_regular_expression_where_letters_are_ascii(words, tokenizer):
    text = TEXTS[0].replace("Ü", "U") + " What is 12? (and x2) " + TEXTS[2]
    wanted = re.findall(r"[A-Za-z0-9]+", text.lower())
    found = keys_of(words, tokenizer, text)
    assert len(found) == len(wanted)
    assert len(set(found)) == len(set(wanted))


def test_a_word_ends_where_tokens_do_not_count(words, tokenizer):
    ids, pooled = read(tokenizer, ["hawkes"])
    assert pooled.sum() > 1
    cut = pooled.clone()
    cut[0, 2] = False
    assert words.words(ids, cut)[1].tolist() != words.words(ids, pooled)[1].tolist()


def test_the_sum_of_the_vectors_of_known_words(words, tokenizer):
    known = ["the", "cameron", "hawkes"]
    keys = torch.tensor([keys_of(words, tokenizer, word)[0] for word in known])
    vectors = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    words.keep(keys, vectors)
    ids, pooled = read(tokenizer, TEXTS)
    found = words(ids, pooled)
    counts = torch.tensor([[2.0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0]])
    wanted = counts @ vectors / pooled.sum(1, keepdim=True).clamp(min=1)
    # 8 bits a number: half a step of the largest.
    torch.testing.assert_close(found, wanted, atol=2 * vectors.abs().max().item() / 127, rtol=0)
    assert found[2].abs().max() > 0.01
    again = words.values_WE.float() * words.scales_W[:, None]
    words.keep(words.keys_W.clone(), again)
    torch.testing.assert_close(words(ids, pooled), found)


@pytest.mark.slow
def test_fitted_together_with_tokens_they_are_least_squares(tokenizer):
    letters = random.Random(1)
    pool = ["alpha", "beta", "gamma", "Delta", "epsilon", "zeta", "eta", "theta"]
    texts = [" ".join(letters.choice(pool) for _ in range(letters.randint(1, 5))) for _ in range(60)]
    teacher = torch.randn(60, 3, generator=torch.Generator().manual_seed(2))
    head = ProjectionHead(HeadConfig(4, 3, "linear", len(tokenizer), None, len(pool)))
    head.words.read_tokens(tokenizer)
    ids, pooled = read(tokenizer, texts)
    batches = [
        {"input_ids": ids[at : at + 25], "pooled": pooled[at : at + 25], "teacher": teacher[at : at + 25]}
        for at in range(0, 60, 25)
    ]
    fit_head(head, batches)
    torch.nn.init.zeros_(head.outer.weight)
    counts = torch.zeros(60, len(tokenizer) + len(pool))
    for number, text in enumerate(texts):
        own = ids[number][pooled[number]]
        for token in own.tolist():
            counts[number, token] += 1 / len(own)
        for word in text.lower().split():
            counts[number, len(tokenizer) + [one.lower() for one in pool].index(word)] += 1 / len(own)
    seen = counts.any(0)
    wide = torch.cat([counts[:, seen], 0.1 * torch.eye(int(seen.sum()))])
    right = torch.cat([teacher, torch.zeros(int(seen.sum()), 3)])
    wanted = counts[:, seen] @ torch.linalg.lstsq(wide, right).solution
    torch.testing.assert_close(head(torch.zeros(60, 4), ids, pooled), wanted, atol=0.02, rtol=0)
    # Room for more words than there are changes nothing.
    more = ProjectionHead(HeadConfig(4, 3, "linear", len(tokenizer), None, 11))
    more.words.read_tokens(tokenizer)
    fit_head(more, batches)
    torch.nn.init.zeros_(more.outer.weight)
    found, again = (one(torch.zeros(60, 4), ids, pooled) for one in (head, more))
    torch.testing.assert_close(again, found, atol=2e-3, rtol=0)


def test_nothing_is_fitted_to_nothing():
    assert not StaticFit(3, 2).solve().any()


def test_a_head_with_words_is_kept(tmp_path, words, tokenizer):
    head = ProjectionHead(HeadConfig(4, 4, "linear", len(tokenizer), None, 3))
    head.words.load_state_dict(words.state_dict())
    head.save(tmp_path)
    back = read_head(tmp_path)
    ids, pooled = read(tokenizer, TEXTS)
    states = torch.zeros(len(TEXTS), 4)
    assert torch.equal(back(states, ids, pooled), head(states, ids, pooled))
    assert back.fingerprint == head.fingerprint
    head.words.values_WE[0, 0] += 1
    assert back.fingerprint != head.fingerprint


@pytest.fixture(scope="module")
def coded(tokenizer):
    """A head with coded vectors of 400 words of the bundled model's, and none of tokens."""
    bundled, letters = gerund.load(), random.Random(0)
    head = ProjectionHead(HeadConfig(4, 384, "linear", len(tokenizer), None, 400, token_vectors=False, word_bytes=96))
    head.words.read_tokens(tokenizer)
    texts = ["the railway was opened by a minister in the nineteenth century", *TEXTS]
    texts += ["".join(letters.choice("abcde") for _ in range(4)) for _ in range(3000)]
    take_words(head, texts, bundled.head, tokenizer)
    return head.eval()


def test_the_words_of_another_head_add_what_they_add_there(coded, tokenizer):
    other = gerund.load().head
    texts = [" railway", " opened", " minister", " century"]
    ids, pooled = read(tokenizer, texts)
    wanted, found = other.static(ids, pooled), coded.static(ids, pooled)
    cosine = torch.nn.functional.cosine_similarity(found, wanted)
    # A code of four numbers in a byte; the token of the space that a text begins with is in both.
    assert cosine.min() > 0.9
    assert (found.norm(dim=1) / wanted.norm(dim=1) - 1).abs().max() < 0.1
    with pytest.raises(ConfigError, match="a vector for no word of these texts"):
        take_words(coded, ["zzqxv", "a" * 500, "日本語"], other, tokenizer)
    # Words that the other head doesn't know add nothing.
    ids, pooled = read(tokenizer, ["zzqxv qqqzx"])
    assert not coded.static(ids, pooled).any()


def test_codes_are_exact_where_a_part_has_few_different_values(tokenizer):
    words = WordVectors(len(tokenizer), 50, 8, 2)
    parts = torch.nn.functional.normalize(torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    choice = torch.randint(0, 5, (50, 2), generator=torch.Generator().manual_seed(1))
    vectors = 3 * parts[choice].flatten(1)
    keys = torch.arange(50, 0, -1)
    words.keep(keys, vectors)
    torch.testing.assert_close(words.vectors(words.rows(keys)[0]), vectors, atol=0.02, rtol=0)  # centers in bfloat16


def test_coded_words_by_numpy_and_by_torch(coded, tokenizer, tmp_path):
    coded.save(tmp_path)
    light, again = read_light_head(tmp_path), read_head(tmp_path)
    assert light.fingerprint == again.fingerprint == coded.fingerprint
    letters = random.Random(3)
    texts = [*TEXTS, "The railway, opened (1893) by a MINISTER's century."]
    texts += [" ".join(letters.choice(["abcd", "railway", "9", "Café", "don't"]) for _ in range(9)) for _ in range(20)]
    ids, pooled = read(tokenizer, texts)
    states = torch.randn(len(texts), 4, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = again(states, ids, pooled).numpy()
    found = light(states.numpy(), ids.numpy(), pooled.numpy())
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert found.dtype == np.float32
    assert np.abs(found - states.numpy() @ light.weight_ED.T).max() > 0.01
    for few in (["", "!!!"], ["日本"], []):  # no known word
        ids, pooled = (tensor.numpy() for tensor in read(tokenizer, few or [""]))
        states = np.ones((len(few), 4), np.float32)
        np.testing.assert_array_equal(light(states, ids[: len(few)], pooled[: len(few)]), states @ light.weight_ED.T)
    with pytest.raises(ConfigError, match="no tokens were passed"):
        light(states)


def test_damaged_coded_words_are_refused(coded, tmp_path):
    coded.save(tmp_path)
    stored = load_file(tmp_path / WEIGHTS_FILE)
    for change in ({"words.codes_WC": stored["words.codes_WC"][:-1]}, {"words.scales_W": stored["words.scales_W"] / 0}):
        save_file({**stored, **{name: tensor.contiguous() for name, tensor in change.items()}}, tmp_path / WEIGHTS_FILE)
        for reader in (read_light_head, read_head):
            with pytest.raises(DataError, match=WEIGHTS_FILE):
                reader(tmp_path)


def test_rounded_numbers_take_two_bytes_and_others_four(tmp_path):
    head = ProjectionHead(HeadConfig(4, 4, "linear", 5))
    with torch.no_grad():
        head.tokens.weight.copy_(head.tokens.weight.bfloat16())
    for _ in range(2):
        head.save(tmp_path)
        stored = load_file(tmp_path / WEIGHTS_FILE)
        assert (stored["tokens.weight"].dtype, stored["outer.weight"].dtype) == (torch.bfloat16, torch.float32)
        back = read_head(tmp_path)
        assert {tensor.dtype for tensor in back.state_dict().values()} == {torch.float32}
        assert back.fingerprint == head.fingerprint
        head = back


def test_words_ask_for_a_vocabulary():
    with pytest.raises(ConfigError, match="a vocabulary of tokens too"):
        HeadConfig(4, words=3)
    with pytest.raises(ConfigError, match="a head's words is a whole number"):
        HeadConfig(4, variant="linear", vocabulary=5, words=0)
    with pytest.raises(ConfigError, match="are for a head with vectors of words"):
        HeadConfig(4, variant="linear", vocabulary=5, word_bytes=4)
    with pytest.raises(ConfigError, match="is false or left out, not True"):
        HeadConfig(4, variant="linear", vocabulary=5, words=3, token_vectors=True)
    with pytest.raises(ConfigError, match="a whole number from 1 to"):
        HeadConfig(4, variant="linear", vocabulary=5, words=10**18)
    with pytest.raises(ConfigError, match="has to divide a head's 128 dimensions, not 5"):
        HeadConfig(4, variant="linear", vocabulary=5, words=3, word_bytes=5)
