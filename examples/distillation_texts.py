"""Texts to distil a sentence encoder on: titles, questions, clauses, sentences and passages, and words by themselves.

Made of articles and books in the layout of JSON Lines, ``title`` and ``text`` on each line. Words come from a
vocabulary file, one on each line, such as the ``vocab.txt`` of the teacher: alone and a few at a time, so that the
student hears of words too that the articles and books lack. A fifth of the texts is in lower case, for teachers that do
not tell cases apart. The bundled model's encoder learned from such texts.

    python examples/distillation_texts.py DATA -o train.jsonl --words vocab.txt
"""

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path

from gerund.data.corpus import clean_text, read_documents
from gerund.errors import DataError

ENDS = re.compile(r"(?<=[.!?])[\"”’)]?\s+(?=[\"“‘(]?[A-Z])")
ABBREVIATION = re.compile(r"(?:\b[A-Z]|\b(?:Mr|Dr|St|Jr|Sr|No|Gen|Col|Rev|Inc|Ltd|Co|vs|ca|etc))\.$")
CLAUSES = re.compile(r"[;:,()–—] ?| which | who | because | although | while | where | when ")
NOT_PROSE = re.compile(r"[|{}\[\]=<>_*]|https?:|\.\.\.\.|  ")
IN_BRACKETS = re.compile(r" \(.*\)$")
QUESTIONS = (
    "What is {}?", "How does {} work?", "Who was {}?", "Where is {}?", "history of {}", "Why is {} important?",
    "information about {}", "{} definition",
)  # fmt: skip
FRAMES = (
    "how to {} {}", "what is {} {}?", "{} and {}", "{} of the {}", "{} in {}", "{} with {}", "using {} for {}",
    "the {} {}", "{} {} {}", "{} {} {} {}", "{} {} {} {} {}", "why does {} {} {}?", "{} for {} and {}",
    "problem with {} {}", "error in {} {}", "effects of {} on {}", "a study of {} in {}", "I lost my {} {}",
    "can I {} my {}?", "{} vs {}", "difference between {} and {}",
)  # fmt: skip
N_FRAMES = 40_000


def n_words(text: str) -> int:
    """Count words as they are set apart by spaces."""
    return text.count(" ") + 1


def is_prose(text: str) -> bool:
    """Whether a text is made of words, most of them English."""
    if NOT_PROSE.search(text) or text.upper() == text:
        return False
    letters = sum(sign.isalpha() or sign == " " for sign in text)
    return letters > 0.8 * len(text) and sum(sign.isascii() for sign in text) > 0.95 * len(text)


def sentences(paragraph: str) -> list[str]:
    """Cut a paragraph at the ends of sentences."""
    found, start = [], 0
    for end in ENDS.finditer(paragraph):
        piece = paragraph[start : end.end()].strip()
        if not ABBREVIATION.search(piece):
            found.append(piece)
            start = end.end()
    return [one for one in [*found, paragraph[start:].strip()] if one]


class Texts:
    """Different texts, whatever their case.

    Args:
        seed: Determines what is taken.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.found: dict[str, str] = {}

    def add(self, texts: list[str]) -> None:
        """Take texts that are not there yet."""
        for text in texts:
            self.found.setdefault(text.lower(), text)

    def often(self, mean: float) -> int:
        """Return a whole number, at random the one below or above a mean."""
        return int(mean) + (self.rng.random() < mean % 1)

    def article(self, title: str, text: str, share: float) -> None:
        """Take an article's title, a question about it, and parts of its text."""
        name = IN_BRACKETS.sub("", title)
        if title and self.rng.random() < 0.6:
            self.add([name])
        if self.rng.random() < 0.15:
            self.add([self.rng.choice(QUESTIONS).format(name)])
        self.parts(text, self.often(4 * share), self.often(0.6 * share), self.often(1.3 * share), self.often(1))

    def parts(self, text: str, n_sentences: int, n_passages: int, n_clauses: int, n_questions: int) -> None:
        """Take so many sentences, passages of up to 130 words, clauses of up to 12, and questions of a text."""
        paragraphs = [" ".join(lines.split()) for lines in re.split(r"\n+", text)]
        cut = [sentences(paragraph) for paragraph in paragraphs if n_words(paragraph) >= 5]
        whole = [
            one
            for own in cut
            for one in own
            if 5 <= n_words(one) <= 45 and is_prose(one) and one[-1] in ".!?\"'”)" and one[0].isupper()
        ]
        asking = [one for one in whole if one.endswith("?")]
        taken = self.rng.sample(whole, min(n_sentences, len(whole)))
        taken += self.rng.sample(asking, min(n_questions, len(asking)))
        for _ in range(n_clauses if whole else 0):
            clauses = [clause.strip(" \"'“”.") for clause in CLAUSES.split(self.rng.choice(whole))]
            short = [clause for clause in clauses if 2 <= n_words(clause) <= 12 and len(clause) > 8]
            taken += [self.rng.choice(short)] if short else []
        several = [own for own in cut if len(own) >= 2]
        for _ in range(n_passages if several else 0):
            own = self.rng.choice(several)
            at, wanted, passage = self.rng.randrange(len(own) - 1), self.rng.randint(40, 120), ""
            for one in own[at:]:
                if passage and n_words(passage) + n_words(one) > wanted:
                    break
                passage = f"{passage} {one}".strip()
            taken += [passage] if 30 <= n_words(passage) <= 130 and is_prose(passage) else []
        self.add(taken)

    def all(self) -> list[str]:
        """Return the texts, mixed."""
        texts = list(self.found.values())
        self.rng.shuffle(texts)
        return texts


def of_words(file: Path, rng: random.Random) -> list[str]:
    """Return each word of a vocabulary, and words in frames."""
    words = [word for word in file.read_text("utf-8").split("\n") if word.isascii() and word.isalpha() and word[1:]]
    longer = [word for word in words if len(word) >= 3]
    texts = [word if rng.random() < 0.7 else word.capitalize() for word in words]
    for _ in range(N_FRAMES):
        frame = rng.choice(FRAMES)
        texts.append(frame.format(*(rng.choice(longer) for _ in range(frame.count("{}")))))
    rng.shuffle(texts)
    return texts


def of_documents(articles: Sequence[Path], books: Path, times: float) -> list[str]:
    """Return the texts of articles, short ones first, and of books."""
    texts = Texts(seed=0)
    for file, share in zip(articles, (0.7, 1.0), strict=True):
        for own in read_documents([file]):
            texts.article(own.title, clean_text(own.text, "wikipedia"), share * times)
    for own in read_documents([books]):
        counts = (texts.often(count * times) for count in (130, 15, 50, 60))
        texts.parts(clean_text(own.text, "gutenberg"), *counts)
    return texts.all()


def main() -> None:
    """Write the texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="holds wiki.train.jsonl.xz, wiki.more.jsonl.xz, books.train.jsonl.xz")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--words", type=Path, required=True, help="a vocabulary, one word on each line")
    parser.add_argument("--times", type=float, default=1.0, help="so many times as many texts of articles and books")
    options = parser.parse_args()
    sources = [options.data / f"{name}.jsonl.xz" for name in ("wiki.train", "wiki.more", "books.train")]
    for file in (*sources, options.words):
        if not file.is_file():
            parser.error(f"no file {file}")
    try:
        texts = of_documents(sources[:2], sources[2], options.times)
    except DataError as error:
        parser.error(str(error))
    rng = random.Random(1)
    words = of_words(options.words, rng)
    lower = [text.lower() if rng.random() < 0.2 else text for text in texts]
    mixed = [*lower, *words]
    # So that a recipe may take the first of them.
    rng.shuffle(mixed)
    with options.output.open("w", encoding="utf-8") as file:
        for text in mixed:
            file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
    print(f"{len(mixed)} texts")


if __name__ == "__main__":
    main()
