"""Infilling by asking: the paper's wording to the letter, what of a continuation is the answer, and real models."""

import pytest

from gerund import ConfigError, Generation, Sampling, TextError
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.infill import prompting
from gerund.inference.infill.prompting import PROMPT_METHODS, STORIES, answer, fill, prompt
from tests.tiny import byte_tokenizer, tiny

GYM = ["John was at the gym. ", " He couldn't get the barbell off his chest. John suffocated."]
GREEDY = Sampling()

GOLDEN = {
    "blank": (
        "Generate the missing line represented by _ in the given text: John was at the gym. _ He couldn't get the "
        "barbell off his chest. John suffocated.\n"
        "Generate a single sentence.\n"
        "The missing line is:"
    ),
    "contextual": (
        'Fill in the missing sentence between "John was at the gym." and "He couldn\'t get the barbell off his chest. '
        'John suffocated.". Generate only one sentence. The missing sentence is:'
    ),
    "prefix-suffix": (
        "Given the prefix and the suffix, generate the middle sentence.\n"
        "Prefix: John was at the gym.\n"
        "Suffix: He couldn't get the barbell off his chest. John suffocated.\n"
        "Generate only one sentence. Middle:"
    ),
    "line-by-line": (
        "You have a four-sentence story with some missing text.\n"
        "Here is the context for each line, with the missing line indicated:\n"
        "Line 1: John was at the gym.\n"
        "Line 2: [Missing Line]\n"
        "Line 3: He couldn't get the barbell off his chest.\n"
        "Line 4: John suffocated.\n"
        "Please generate the missing line of the story. Please generate only the missing line and nothing else.\n"
        "The missing line is: Line 2:"
    ),
}


@pytest.fixture
def scripted(monkeypatch):
    """A model that writes what it is told to; holds what it was asked and how."""

    class Scripted:
        def __init__(self):
            self.answers, self.asked, self.settings = [], [], []

        def fill(self, pieces, answers, **settings):
            self.answers = list(answers)
            plain = {"method": "blank", "shots": 0, "max_tokens": 4, "sampling": GREEDY}
            tokenizer = byte_tokenizer()
            tokenizer.model_max_length = 10_000
            model = tiny("llama", vocab_size=300, max_position_embeddings=10_000)
            return fill(model, tokenizer, pieces, **{**plain, **settings})

        def __call__(self, model, tokenizer, prompts, settings, batch_size):
            self.asked += prompts
            self.settings.append(settings)
            return [Generation(self.answers.pop(0), [], 0.0, False)]

    found = Scripted()
    monkeypatch.setattr(prompting, "generate", found)
    return found


@pytest.mark.parametrize("method", PROMPT_METHODS)
def test_the_papers_wording(method, scripted):
    assert scripted.fill(GYM, [" He lifted. And"], method=method) == ["He lifted."]
    assert scripted.asked == [GOLDEN[method]]
    assert scripted.settings == [GenerationConfig(4, GREEDY)]


@pytest.mark.parametrize("method", ["blank", "prefix-suffix", "line-by-line"])
def test_five_solved_examples_in_the_same_words(method, scripted):
    scripted.fill(GYM, ["x"], method=method, shots=5)
    [asked] = scripted.asked
    *examples, last = asked.split("\n\n")
    assert last == GOLDEN[method]
    assert len(examples) == 5
    for example, (sentences, missing) in zip(examples, STORIES, strict=True):
        before, behind = " ".join(sentences[:missing]) + " ", " " + " ".join(sentences[missing + 1 :])
        assert example == f"{prompt(before, [behind], method, 0)} {sentences[missing]}"
        assert example.count(sentences[missing]) == 1


def test_the_stories_are_whole():
    assert len(STORIES) == 5
    for sentences, missing in STORIES:
        assert 0 < missing < 4
        for sentence in sentences:
            assert answer(f" {sentence} Next.") == sentence
    assert len({sentence for sentences, _ in STORIES for sentence in sentences}) == 25


def test_answers_become_context_and_later_gaps_are_left_out(scripted):
    pieces = ["One. ", " Three. ", " Five."]
    assert scripted.fill(pieces, ["Two.", "Four."], method="contextual") == ["Two.", "Four."]
    start, end = 'Fill in the missing sentence between "', ". Generate only one sentence. The missing sentence is:"
    assert scripted.asked == [f'{start}One." and "Three. Five."{end}', f'{start}One. Two. Three." and "Five."{end}']
    scripted.asked.clear()
    assert scripted.fill(pieces, ["", "Four."], method="blank") == ["", "Four."]
    assert [asked.split("text: ")[1].split("\n")[0] for asked in scripted.asked] == [
        "One. _ Three. Five.",
        "One. Three. _ Five.",
    ]


def test_line_by_line_numbers_every_missing_line(scripted):
    scripted.fill(["One. ", " Three. ", " Five."], ["Two.", "Four."], method="line-by-line")
    first, second = scripted.asked
    assert first.splitlines()[0] == "You have a five-sentence story with some missing text."
    assert first.splitlines()[2:7] == [
        "Line 1: One.", "Line 2: [Missing Line]", "Line 3: Three.", "Line 4: [Missing Line]", "Line 5: Five.",
    ]  # fmt: skip
    assert first.endswith("Line 2:")
    assert second.splitlines()[2:7] == [
        "Line 1: One.", "Line 2: Two.", "Line 3: Three.", "Line 4: [Missing Line]", "Line 5: Five.",
    ]  # fmt: skip
    assert second.endswith("Line 4:")


def test_gaps_at_both_ends_and_line_breaks(scripted):
    scripted.fill(["", " Two\nlines. Three.\n", ""], ["One.", "Four."], method="line-by-line")
    assert scripted.asked[0].splitlines()[2:7] == [
        "Line 1: [Missing Line]", "Line 2: Two", "Line 3: lines.", "Line 4: Three.", "Line 5: [Missing Line]",
    ]  # fmt: skip
    assert scripted.asked[0].endswith("Line 1:")
    assert scripted.asked[1].endswith("Line 5:")
    assert "Suffix: Two lines. Three." in prompt("", [" Two\nlines. Three.\n"], "prefix-suffix", 0)
    long = prompt("It ran. " * 13, [""], "line-by-line", 0)
    assert long.startswith("You have a 14-sentence story")
    assert long.endswith("Line 14:")


def test_the_period_of_a_template_is_not_doubled():
    asked = prompt("no period", [" a question?"], "prefix-suffix", 0)
    assert "Prefix: no period.\nSuffix: a question?\n" in asked
    assert 'Prefix: He said "no."\n' in prompt('He said "no." ', ["x"], "prefix-suffix", 0)
    assert "text: a _ b.\n" in prompt("a ", [" b"], "blank", 0)


@pytest.mark.parametrize(
    "continuation, wanted",
    [
        (" He ran. Then he sat.", "He ran."),
        ("\n\n  He ran\nLine 3: x", "He ran"),
        (' "He ran." he said', "He ran."),
        (" “He ran.” x", "He ran."),
        ('He ran."', "He ran."),
        ('He said, "I ran." Then', 'He said, "I ran."'),
        ('He said "no".', 'He said "no".'),
        ("Mr. Smith didn't run. He", "Mr. Smith didn't run."),
        ("'Tis late.", "'Tis late."),
        ("Line 2: He ran.", "He ran."),
        ("", ""),
        (" \n\t\n", ""),
        ('""', ""),
    ],
)
def test_the_answer_in_a_continuation(continuation, wanted):
    assert answer(continuation) == wanted


def test_each_gap_draws_anew(scripted):
    scripted.fill(["a ", " b ", " c"], ["x", "y"], sampling=Sampling(temperature=1, seed=3))
    one, two = (settings.sampling for settings in scripted.settings)
    assert one == Sampling(temperature=1, seed=3)
    assert two.seed != 3


@pytest.mark.parametrize(
    "settings, error, message",
    [
        ({"method": "magic"}, ConfigError, "unknown prompt for infilling 'magic'; valid are: blank, contextual, "),
        ({"shots": 6}, ConfigError, "shots is a whole number from 0 to 5, not 6"),
        ({"shots": True}, ConfigError, "from 0 to 5, not True"),
        ({"method": "contextual", "shots": 5}, ConfigError, "the method 'contextual' takes no solved examples"),
        ({"max_tokens": 0}, ConfigError, "max_tokens is a whole number of at least 1, not 0"),
        ({"pieces": ["alone"]}, TextError, "there is no span to infill"),
        ({"pieces": [" ", "\n"]}, TextError, "there is no text around the spans"),
        ({"pieces": ["a", 3]}, TextError, "text 1 is not a string but int"),
        ({"pieces": ["a", "\udcff"]}, TextError, "the text is not valid Unicode"),
    ],
)
def test_mistakes(scripted, settings, error, message):
    pieces = settings.pop("pieces", GYM)
    with pytest.raises(error, match=message):
        scripted.fill(pieces, [], **settings)
    assert scripted.asked == []


def test_a_prompt_that_is_too_long():
    tokenizer, model = byte_tokenizer(), tiny("llama", vocab_size=300, max_position_embeddings=400)
    tokenizer.model_max_length = 400
    settings = {"method": "blank", "max_tokens": 8, "sampling": GREEDY}
    assert len(fill(model, tokenizer, ["a ", " b"], shots=0, **settings)) == 1
    with pytest.raises(TextError, match=r"blank prompt with 5 solved examples for span 1 has \d+ tokens and 8 more"):
        fill(model, tokenizer, ["a ", " b"], shots=5, **settings)
    with pytest.raises(TextError, match=r"the model's context ends at 400; shorten the text$"):
        fill(model, tokenizer, ["a ", " b" * 200], shots=0, **settings)


@pytest.mark.slow
def test_the_embedded_default_answers(bundled):
    for method in PROMPT_METHODS:
        settings = {"method": method, "max_tokens": 3, "sampling": Sampling(temperature=1, seed=1)}
        shots = 0 if method == "contextual" else 1
        once = fill(bundled.model, bundled.tokenizer, GYM, shots=shots, **settings)
        assert once == fill(bundled.model, bundled.tokenizer, GYM, shots=shots, **settings)
        [plain] = bundled.generate(prompt(GYM[0], GYM[1:], method, shots), 3, Sampling(temperature=1, seed=1))
        assert once == [answer(plain.text)]
        assert "\n" not in once[0]
