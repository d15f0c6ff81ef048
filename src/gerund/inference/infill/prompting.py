"""Infilling by prompting a model that was not trained to infill (MAGNET, appendix B).

The wording of the prompts is the paper's, typos of its layout aside: a period that a template puts after a text is not
doubled, and the prompts end where the answer begins.
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from gerund.checks import check_texts
from gerund.errors import ConfigError, TextError, unknown_name
from gerund.inference.generate.config import GenerationConfig
from gerund.inference.generate.generation import generate
from gerund.inference.generate.sampling import request_seeds
from gerund.inference.text_ids import text_ids
from gerund.inference.tokens import check_unicode, context_length
from gerund.settings.sampling import Sampling
from gerund.text_analysis import segments

PROMPT_METHODS = ("blank", "contextual", "prefix-suffix", "line-by-line")

# Solved examples: five stories of five sentences; the missing one is marked.
_STORIES = """\
Nora wanted to bake bread for the first time.
She mixed flour, water and salt and put the dough in the oven.
> An hour later it was as flat and hard as a plate.
Her neighbour looked at it and asked where the yeast was.
The next loaf rose so high that it touched the top of the oven.

Sam's bus was late again on Monday.
> He decided to walk to school through the park.
Halfway there he met a lost dog with a red collar.
He called the number on the collar and waited with it.
The owner was so glad that she drove him the rest of the way.

Our old piano had not been played for years.
Last spring my sister began to take lessons.
At first only three of the keys made a clean sound.
> A tuner came and worked on it for a whole afternoon.
Now there is music in the house every evening.

Ivan planted a row of tomatoes behind the shed.
> Every morning something had eaten a few of the leaves.
One night he stayed up with a lamp to see who it was.
A family of snails came slowly out of the wall.
He carried them to the far end of the meadow in a bucket.

Mei had saved for a ticket to the concert since winter.
On the day of the concert she left it on the kitchen table.
> She only noticed when she stood at the gate.
Her brother rode across the city on his bicycle to bring it.
They listened to the last songs together from outside the fence.
"""
STORIES = tuple(
    (tuple(line.removeprefix("> ") for line in lines), next(i for i, line in enumerate(lines) if line[0] == ">"))
    for lines in (story.splitlines() for story in _STORIES.split("\n\n"))
)
"""The sentences of each solved example, and the index of the missing one."""

_NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_CLOSING = {'"': '"', "“": "”", "«": "»", "„": "“"}
# Each blank has its own seed: otherwise two prompts would share their random numbers.
_NEXT_SEED = 1_000_000_007


def fill(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    pieces: Sequence[str],
    *,
    method: str,
    shots: int,
    max_tokens: int,
    sampling: Sampling,
) -> list[str]:
    """Prompt the model for the missing text between the pieces of a text; return an answer per blank.

    Blanks are filled from left to right, and each answer becomes context of the next. Later blanks are omitted from the
    context; ``line-by-line`` shows them as missing lines. An answer is the first sentence of the continuation's first
    line, without quotes and white space around it; empty when the model generated nothing.
    """
    check_prompting(method, shots, max_tokens)
    texts = check_texts(pieces)
    if len(texts) < 2:
        raise TextError("there is no span to infill: give the texts on both sides of it")
    if not any(text.strip() for text in texts):
        raise TextError("there is no text around the spans")
    answers: list[str] = []
    before = texts[0]
    [seed] = request_seeds(sampling, 1)
    for number in range(len(texts) - 1):
        question = prompt(before, texts[number + 1 :], method, shots)
        _check_room(model, tokenizer, question, number, method, shots, max_tokens)
        seeded = sampling if sampling.seed is None else replace(sampling, seed=seed + number * _NEXT_SEED)
        [result] = generate(model, tokenizer, [question], GenerationConfig(max_tokens, seeded), batch_size=1)
        answers.append(answer(result.text))
        before = _joined(before, answers[-1]) + texts[number + 1]
    return answers


def prompt(before: str, behind: Sequence[str], method: str, shots: int) -> str:
    """Return the prompt for the blank between ``before`` and ``behind[0]``, after ``shots`` solved examples."""
    ask = {
        "blank": _blank,
        "contextual": _contextual,
        "prefix-suffix": _prefix_suffix,
        "line-by-line": _line_by_line,
    }[method]
    solved = []
    for sentences, missing in STORIES[:shots]:
        example = ask(" ".join(sentences[:missing]) + " ", [" " + " ".join(sentences[missing + 1 :])])
        solved.append(f"{example} {sentences[missing]}\n\n")
    return "".join(solved) + ask(before, behind)


def answer(continuation: str) -> str:
    r"""Return the first sentence of a continuation's first line, without what surrounds it.

    >>> answer(' "He ran home." It was late.')
    'He ran home.'
    >>> answer("Line 2: He ran home. It was late.\nLine 3: ...")
    'He ran home.'
    """
    line = next((line.strip() for line in continuation.splitlines() if line.strip()), "")
    line = re.sub(r"^Line \d+:\s*", "", line)
    if line[:1] in _CLOSING:
        line = line[1:].split(_CLOSING[line[0]], maxsplit=1)[0]
    first = next(iter(_sentences(line)), "")
    quotes = "".join({*_CLOSING, *_CLOSING.values()})
    # A quote that was opened inside the sentence may close at its end.
    return first if sum(first.count(quote) for quote in quotes) > 1 else first.strip(quotes).strip()


def _blank(before: str, behind: Sequence[str]) -> str:
    text = _flat(_joined(before, "_") + "".join(behind))
    return (
        f"Generate the missing line represented by _ in the given text: {_ended(text)}\n"
        "Generate a single sentence.\n"
        "The missing line is:"
    )


def _contextual(before: str, behind: Sequence[str]) -> str:
    past, future = _flat(before), _flat("".join(behind))
    return (
        f'Fill in the missing sentence between "{past}" and "{future}". Generate only one sentence. '
        "The missing sentence is:"
    )


def _prefix_suffix(before: str, behind: Sequence[str]) -> str:
    past, future = _flat(before), _flat("".join(behind))
    return (
        "Given the prefix and the suffix, generate the middle sentence.\n"
        f"Prefix: {_ended(past)}\n"
        f"Suffix: {_ended(future)}\n"
        "Generate only one sentence. Middle:"
    )


def _line_by_line(before: str, behind: Sequence[str]) -> str:
    lines: list[str | None] = [*_sentences(before)]
    number = len(lines) + 1
    for text in behind:
        lines += [None, *_sentences(text)]
    shown = [f"Line {i}: {'[Missing Line]' if line is None else line}" for i, line in enumerate(lines, start=1)]
    count = _NUMBERS[len(lines) - 1] if len(lines) <= len(_NUMBERS) else str(len(lines))
    return (
        f"You have a {count}-sentence story with some missing text.\n"
        "Here is the context for each line, with the missing line indicated:\n"
        + "\n".join(shown)
        + "\nPlease generate the missing line of the story. Please generate only the missing line and nothing else.\n"
        f"The missing line is: Line {number}:"
    )


def _sentences(text: str) -> list[str]:
    """Return the sentences of a text; a line break ends a sentence."""
    lines = [line for line in text.splitlines() if line.strip()]
    return [sentence.strip() for line in lines for sentence in segments(line) if sentence.strip()]


def _joined(before: str, text: str) -> str:
    """Join two texts, with a space between them where there is no white space."""
    return before + text if not before or not text or before[-1].isspace() else f"{before} {text}"


def _flat(text: str) -> str:
    """Return a text as one line: line breaks separate the parts of a prompt."""
    return " ".join(text.split())


def _ended(text: str) -> str:
    """Append the template's period to a text, unless it ends with one already."""
    return text if text.rstrip("\"'”’)").endswith((".", "!", "?", "…")) else f"{text}."


def check_prompting(method: str, shots: int, max_tokens: int) -> None:
    """Raise ``ConfigError`` for an unknown method, an impossible number, or examples for a method that takes none."""
    if method not in PROMPT_METHODS:
        raise unknown_name("prompt for infilling", method, PROMPT_METHODS)
    if type(shots) is not int or not 0 <= shots <= len(STORIES):
        raise ConfigError(f"shots is a whole number from 0 to {len(STORIES)}, not {shots!r}")
    if method == "contextual" and shots:
        raise ConfigError("the method 'contextual' takes no solved examples; give shots=0 or another method")
    if type(max_tokens) is not int or max_tokens < 1:
        raise ConfigError(f"max_tokens is a whole number of at least 1, not {max_tokens!r}")


def _check_room(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    number: int,
    method: str,
    shots: int,
    max_tokens: int,
) -> None:
    check_unicode("the text", question)
    limit = context_length(model.config, tokenizer)
    length = len(text_ids(tokenizer, question))
    if limit is not None and length + max_tokens > limit:
        examples = f" with {shots} solved examples" if shots else ""
        raise TextError(
            f"the {method} prompt{examples} for span {number + 1} has {length} tokens and {max_tokens} more are to be "
            f"written, and the model's context ends at {limit}; shorten the text{' or give fewer shots' * bool(shots)}"
        )
