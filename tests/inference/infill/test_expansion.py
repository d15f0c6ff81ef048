"""Masks never touch what is kept, fillings are told apart, and both kinds of model expand queries."""

import re
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, TextError
from gerund.inference.infill.expansion import Query, expand
from gerund.settings.sampling import Sampling
from gerund.types import Infill
from tests.tiny import save_tiny, save_tiny_t5

NUCLEUS = Sampling(temperature=1.0, top_p=0.9, seed=0)
BLANK = "[blank]"


def masks(text, keep=(), fraction=0.3, n=200, **more):
    query, rng = Query.of(text, keep), np.random.default_rng(0)
    return [query.masked(rng, fraction=fraction, blank=BLANK, **more) for _ in range(n)]


class Filler:
    """Fills each gap with the words that it is given in turn, and remembers what it was asked."""

    def __init__(self, *fillings):
        self.fillings = fillings
        self.asked = []

    def __call__(self, text, sampling):
        spans_scores = self.fillings[len(self.asked) % len(self.fillings)]
        self.asked.append((text, sampling))
        gaps = text.count(BLANK)
        span, score = spans_scores
        return Infill(text.replace(BLANK, span), [span] * gaps, [[1]] * gaps, [score] * gaps, [1] * gaps)


class TestMasks:
    def test_whole_words_in_the_right_number(self):
        text = "one two three four, five six seven eight nine ten"
        words = re.findall(r"\w+", text)
        seen = Counter()
        for prompt in masks(text):
            left = re.findall(r"\w+", prompt.replace(BLANK, " "))
            assert len(left) == 7
            assert [word for word in words if word in left] == left
            seen.update(set(words) - set(left))
            # No two gaps without a word or a sign between them, as the infilling wants it.
            assert all(piece.strip() for piece in prompt.split(BLANK)[1:-1])
        # Each about as often: 200 * 0.3.
        assert all(35 < seen[word] < 85 for word in words)

    def test_what_is_kept_stays_wherever_it_stands(self):
        for prompt in masks("Dry damp walls and walls of stone", ["WALLS", "damp walls"], fraction=0.5):
            assert prompt.count("walls") == 2
            assert "damp walls" in prompt

    @pytest.mark.parametrize(
        ("query", "keep", "shown"),
        [
            ("Where is the cafe\u0301 open", "CAF\u00c9", "cafe\u0301"),
            ("caf\u00e9 near the station", "cafe\u0301", "caf\u00e9"),
            ("how photo\u00adsynthesis works", "photosynthesis", "photo\u00adsynthesis"),
            ("an ef\ufb01cient wall", "efficient", "ef\ufb01cient"),
            ("price of \u00bd pound", "1", "\u00bd"),
        ],
    )
    def test_what_is_kept_is_compared_in_its_normal_form_and_stays_as_it_is(self, query, keep, shown):
        for prompt in masks(query, [keep], fraction=0.6, n=20):
            assert shown in prompt
            assert BLANK in prompt

    @pytest.mark.parametrize(
        ("query", "words"),
        [
            ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
            ("cafe\u0301 bar", ["cafe\u0301", "bar"]),
            ("ที่นี่", ["ที่", "นี่"]),
            ("한국어 문장", ["한국어", "문장"]),
            ("北京", ["北", "京"]),
        ],
    )
    def test_words_are_those_of_the_script(self, query, words):
        assert [query[start:end] for start, end in Query.of(query).words] == words

    def test_one_text_to_keep_is_meant_as_a_whole(self):
        assert masks("dry damp walls", "damp walls") == masks("dry damp walls", ["damp walls"])

    @pytest.mark.parametrize("keep", [3, [3], None, ["dry", None]])
    def test_what_is_to_be_kept_is_words(self, keep):
        with pytest.raises(TextError, match="what is to be kept is a list of words of the query, not "):
            Query.of("dry damp walls", keep)

    def test_a_part_of_a_word_is_not_the_word(self):
        with pytest.raises(TextError, match="'wall' is to be kept and is not in the query"):
            Query.of("dry damp walls", ["wall"])

    def test_at_least_one_word_is_masked_and_one_stays(self):
        assert {prompt.count(BLANK) for prompt in masks("a b", fraction=0.01)} == {1}
        assert set(masks("a b", fraction=0.99)) == {"[blank] b", "a [blank]"}
        assert set(masks("a b c", ["b"], fraction=0.99)) == {"[blank] b [blank]"}

    @pytest.mark.parametrize("text, keep", [("walls", ()), ("damp walls", ["damp", "walls"])])
    def test_where_nothing_may_be_masked_there_is_a_gap_beside(self, text, keep):
        assert set(masks(text, keep)) == {f"{text} {BLANK}", f"{BLANK} {text}"}
        assert set(masks(text, keep, begins=False)) == {f"{text} {BLANK}"}

    def test_a_prompt_that_may_not_begin_with_a_gap_does_not(self):
        assert all(prompt.startswith("one") for prompt in masks("one two three", fraction=0.6, begins=False))

    def test_signs_stay_and_characters_without_spaces_are_words(self):
        assert all(prompt.endswith("?") for prompt in masks("how high?", fraction=0.5))
        found = masks("焊接平台高度", fraction=0.3)
        assert {len(prompt.replace(BLANK, "")) for prompt in found} == {4}
        assert all("平台" in prompt for prompt in masks("焊接平台高度", ["平台"], fraction=0.6))

    @pytest.mark.parametrize("text, message", [("", "the query is empty"), (" \n", "is empty"), ("?!", "has no word")])
    def test_a_query_without_words(self, text, message):
        with pytest.raises(TextError, match=message):
            Query.of(text)


class TestExpanding:
    def test_the_most_probable_comes_first_and_nothing_twice(self):
        fill = Filler(("wet", -2.0), ("WET", -1.5), (" wet ", -3.0), ("old", -1.0), ("", 0.0), ("damp", -0.1))
        with pytest.warns(UserWarning, match=r"3 of 5 expansions of 'dry \[blank\] walls' were found"):
            found = expand(fill, f"dry {BLANK} walls", 5, blank=BLANK, sampling=replace(NUCLEUS, seed=-1))
        # What fills nothing is none.
        assert found == ["dry damp walls", "dry old walls", "dry WET walls"]

    def test_enough_is_enough(self):
        fill = Filler(("wet", -2.0), ("old", -1.0), ("new", -3.0))
        assert expand(fill, f"dry {BLANK} walls", 2, blank=BLANK, sampling=NUCLEUS) == [
            "dry old walls",
            "dry wet walls",
        ]
        assert len(fill.asked) == 2

    def test_fillings_that_read_the_same_are_one(self):
        fill = Filler(("cafe\u0301", -1.0), ("caf\u00e9", -0.5), ("ca\u00adf\u00e9", -2.0), ("bar", -3.0))
        found = expand(fill, f"photo\u00adgraphs of a {BLANK}", 2, blank=BLANK, sampling=NUCLEUS)
        assert found == ["photo\u00adgraphs of a caf\u00e9", "photo\u00adgraphs of a bar"]

    def test_a_word_that_a_line_end_divides_stands_whole(self):
        fill = Filler(("new", -1.0))
        assert expand(fill, f"reor-\nganised {BLANK} firm", 1, blank=BLANK, sampling=NUCLEUS) == [
            "reor- ganised new firm"
        ]

    def test_the_query_itself_is_no_expansion_of_it(self):
        fill = Filler(("Walls", -1.0), ("rooms", -2.0))
        assert expand(fill, "dry walls", 1, keep=["dry"], blank=BLANK, sampling=NUCLEUS) == ["dry rooms"]

    def test_what_grows_together_with_a_word_is_left_out(self):
        query = "dry damp walls"
        fill = Filler(("x", -1.0))
        grown = lambda text, own: fill(text.replace(f" {BLANK}", BLANK), own)  # noqa: E731
        with pytest.warns(UserWarning, match="of 9 expansions"):
            found = expand(grown, query, 9, keep=["dry"], blank=BLANK, sampling=NUCLEUS)
        assert found == []
        # A blank of one's own is no different.
        with pytest.warns(UserWarning, match="0 of 2 expansions"):
            assert expand(grown, f"dry {BLANK} walls", 2, blank=BLANK, sampling=NUCLEUS) == []

    def test_half_of_a_character_is_left_out(self):
        fill = Filler(("old\ufffd", -1.0), ("new", -2.0))
        assert expand(fill, f"dry {BLANK} walls", 1, blank=BLANK, sampling=NUCLEUS) == ["dry new walls"]

    def test_every_filling_draws_anew_and_a_seed_repeats_it(self):
        runs = []
        for _ in range(2):
            fill = Filler(*((f"x{n}", -n) for n in range(9)))
            expand(fill, "one two three four", 9, blank=BLANK, sampling=NUCLEUS)
            runs.append(fill.asked)
        assert runs[0] == runs[1]
        assert len({own.seed for _, own in runs[0]}) == 9
        assert len({text for text, _ in runs[0]}) > 1

    def test_one_greedy_filling_of_a_gap_is_all_there_is(self):
        fill = Filler(("wet", -1.0))
        with pytest.warns(UserWarning, match="1 of 3"):
            expand(fill, f"dry {BLANK}", 3, blank=BLANK, sampling=Sampling())
        assert len(fill.asked) == 1

    def test_mistakes(self):
        def go(query="a b", count=1, **more):
            return expand(Filler(("x", -1.0)), query, count, **{"blank": BLANK, "sampling": NUCLEUS, **more})

        for settings, message in (
            ({"count": 0}, "count is a whole number from 1 to 10000, not 0"),
            ({"count": True}, "not True"),
            ({"fraction": 0.0}, "lies between 0 and 1, and is 0.0"),
            ({"fraction": "0.3"}, "fraction is a number, not '0.3'"),
            ({"query": f"a {BLANK}", "keep": ["a"]}, "there is nothing to keep"),
            ({"query": f"a {BLANK}", "fraction": 0.5}, "nothing to keep or to mask"),
        ):
            with pytest.raises(ConfigError, match=message):
                go(**settings)
        for query, message in ((3, "a string, not int"), ("a \ud800", "not valid Unicode")):
            with pytest.raises(TextError, match=message):
                go(query)


@pytest.fixture(scope="module", params=["t5", "llama", "no beginning"])
def lm(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "model"
    if request.param == "t5":
        return gerund.load(save_tiny_t5(folder), dtype="float32")
    bos = request.param == "llama"
    return gerund.load(save_tiny(folder, bos=bos), dtype="float32")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*expansions of:UserWarning")
def test_models_expand(lm):
    sampling = Sampling(temperature=1.0, seed=3)
    found = lm.expand("the cat in the rain", 3, keep=["cat"], sampling=sampling, max_tokens=3)
    assert found == lm.expand("the cat in the rain", 3, keep=["cat"], sampling=sampling, max_tokens=3)
    assert all("cat" in text.lower() for text in found)
    assert len(found) <= 3
    assert len(set(found)) == len(found)
    for text in lm.expand("the [blank] in the rain", 3, sampling=sampling, max_tokens=3):
        assert text.startswith("the")
        assert text.endswith("in the rain")
