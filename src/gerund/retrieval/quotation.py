"""Choose the sentence of the found chunks that answers a question, without the Markdown around it."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from gerund.data.passages import sentence_bounds
from gerund.retrieval.documents import PATH_SIGN, Chunk
from gerund.retrieval.hybrid_search import convex
from gerund.retrieval.memory_store import MemoryStore
from gerund.retrieval.question_answering import sources_of
from gerund.retrieval.store import IndexMetadata, KeywordQuery
from gerund.types import Hit, Source

# Chunk and sentence score at most 1 each, so text that is not a sentence is quoted only where there is nothing else.
# Entries of lists, such as a manual's options, end without a full stop and may be the answer.
_NOT_A_SENTENCE, _NO_END = 2.0, 0.2
# The synopsis of a command, which ends as a sentence may: "ls [OPTION]... [FILE]...".
_SYNOPSIS = re.compile(r"SYNOPSIS\b|(?s:(?=.*\[).*\.\.\.\Z)")
# Lines of Markdown that are no part of what follows: a paragraph's first line with a line under it, which is a heading
# or the head of a table; a heading that begins with #, or a row of a table; a rule.
_UNDERLINE = r"\n[ \t]*(?:={3,}[ \t]*|-{3,}[ \t]*|\|[ \t:|]*-[ \t:|-]*)"
_LINE_ALONE = re.compile(
    rf"(?:\A|(?<=\n\n))[ \t]{{0,3}}(?P<title>\S.*){_UNDERLINE}$"
    r"|^[ \t]{0,3}(?:(?P<row>#{1,6}[ \t].*|\|.*)|[-=*_]{3,}[ \t]*)$",
    re.MULTILINE,
)
_UNDERLINED = re.compile(rf"{_UNDERLINE}\Z")
# The heading above a paragraph of a manual page, or the mark of a list's item. A synopsis keeps its heading, by which
# it is known.
_MARKS = re.compile(r"\s*(?:(?!SYNOPSIS)[A-Z][A-Z0-9 ,/-]*\n[ \t]+(?=\S)|[-*+\u2022][ \t]+)?")
# The end of a sentence, perhaps in quotation marks or brackets.
_SENTENCE_END = re.compile(r"""[.!?\u2026\u3002\uff01\uff1f]["'\u201d\u2019\u00bb\u300d)\]*_]*\Z""")
# The rest of a sentence that was split at a sign that does not end it, for example in a span of code.
_SENTENCE_REST = re.compile(r"(?:\.\s|[!?,;:)\]}\u201d\u00bb])")
# Code by its beginning (fences, prompts, keywords), and by its contents where it does not end as a sentence does.
_CODE_START = re.compile(r"(?:```|~~~|>>>|\.\.\. |\$ |import |from [\w.]+ import |def |class |return |@\w)")
_CODE = re.compile(r"\w\(.*\)|[{};]\s*\Z|\w\s*[-+*/]?=\s*\S|</?\w[^>]*>|\w::\w|->")


def best_sentence(
    question: str,
    hits: Sequence[Hit],
    encode: Callable[[Sequence[str]], np.ndarray],
    about: IndexMetadata,
    weight: float,
) -> Source:
    """Return the sentence of the hits, best first and at least one, that matches the question best.

    Sentences are ranked as chunks are, by BM25 and vectors, and the chunk's score counts as much as the sentence's.
    Headings, code and lines without the end of a sentence rank after sentences. ``encode`` takes the question and then
    sentences, and returns vectors of length 1; ``weight`` is that of the vectors. The source has the number of the hit,
    and the sentence's offsets in its document.
    """
    sources = sources_of(hits)
    sentences = [
        replace(source, text=source.text[start:end], start=source.start + start, end=source.start + end)
        for source in sources
        for start, end in _quotable(source.text, about.chunking.language)
    ] or sources
    vectors_ND = encode([question, *(sentence.text for sentence in sentences)])
    store = MemoryStore()
    store.create(about)
    chunks = [
        Chunk(str(index), 0, len(sentence.text), sentence.text, 0, 0, "", "", "", "")
        for index, sentence in enumerate(sentences)
    ]
    store.replace([chunk.source for chunk in chunks], chunks, vectors_ND[1:])
    words = {int(chunk.source): score for chunk, score in store.words(KeywordQuery.of(question), len(chunks))}
    vectors = {int(chunk.source): score for chunk, score in store.vectors(vectors_ND[0], len(chunks))}
    scores = convex(words, vectors, weight)

    def score(index: int) -> float:
        hit = hits[sentences[index].number - 1]
        return scores[index] + hit.score - _penalty(sentences[index].text, hit)

    return sentences[max(scores, key=score)]


def _quotable(text: str, language: str) -> Iterator[tuple[int, int]]:
    r"""Yield the offsets of a text's sentences, headings and rows of tables.

    What stands in a line of its own in Markdown is no part of the sentence after it, and nor is a manual page's heading
    or the mark of a list's item.

    >>> text = "# Hours\nWe open. We close.\n\nPrices\n===\n- Tea costs 2 euros.\n\n| a | b |\n|---|---|\n| tea | 2 |"
    >>> [text[start:end] for start, end in _quotable(text, "en")][:4]
    ['# Hours', 'We open.', 'We close.', 'Prices\n===']
    >>> [text[start:end] for start, end in _quotable(text, "en")][4:]
    ['Tea costs 2 euros.', '| a | b |\n|---|---|', '| tea | 2 |']
    >>> text = "DESCRIPTION\n       List the files.  Sort them."
    >>> [text[start:end] for start, end in _quotable(text, "en")]
    ['List the files.', 'Sort them.']
    """
    for start, end in sentence_bounds(text, language):
        place = start
        line_start = text.rfind("\n", 0, start) + 1
        begin = line_start if text[line_start:start].isspace() else start
        is_code = _CODE_START.match(text, start, end)
        for line in () if is_code else _LINE_ALONE.finditer(text, begin, end):
            yield from _without_marks(text, place, line.start())
            if line["row"]:
                yield from _without_marks(text, *line.span("row"))
            elif line["title"]:
                is_sentence = _SENTENCE_END.search(line["title"])
                yield from _without_marks(text, *line.span("title" if is_sentence else 0))
            place = line.end()
        yield from _without_marks(text, place, end)


def _without_marks(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the offsets without the white space around them, and what stands before a sentence; none of a mere line."""
    if marks := _MARKS.match(text, start, end):
        start = marks.end()
    stretch = text[start:end].strip()
    if re.search(r"\w", stretch):
        start += text[start:end].index(stretch)
        yield start, start + len(stretch)


def _penalty(text: str, hit: Hit) -> float:
    """Return what is subtracted from the score of a text that may not be a sentence.

    A heading often has all words of a question and does not answer it; a line of a list may be the answer.

    >>> hit = Hit("a", 0, 30, "...", 1.0, 1, heading="Opening hours")
    >>> [_penalty(one, hit) for one in ("It opens at 9.", "- open: 9 to 5", "## Hours", "Opening hours", "x = f(9)")]
    [0.0, 0.2, 2.0, 2.0, 2.0]
    >>> [_penalty(text, hit) for text in ("? ` gets a full stop.", "ls [OPTION]... [FILE]...")]
    [2.0, 2.0]
    """
    line = text.strip()
    headings = {heading.strip().casefold() for heading in (hit.title, *hit.heading.split(PATH_SIGN))}
    if (
        line.startswith("#")
        or _UNDERLINED.search(line)
        or line.casefold() in headings
        or _CODE_START.match(line)
        or _SENTENCE_REST.match(line)
        or _SYNOPSIS.match(line)
    ):
        return _NOT_A_SENTENCE
    if _SENTENCE_END.search(line):
        return 0.0
    return _NOT_A_SENTENCE if _CODE.search(line) else _NO_END
