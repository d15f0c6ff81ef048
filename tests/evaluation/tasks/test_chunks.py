import random

import pytest

from gerund.papers.token_labels import ChunkScores, chunk_scores, chunks, conll_splits, read_conll

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


def random_sentences(n: int, seed: int) -> list[list[str]]:
    """Return sentences with tags in any order, such as I- after O and types that change within a chunk."""
    rng = random.Random(seed)
    return [rng.choices(TAGS, k=rng.randrange(1, 12)) for _ in range(n)]


@pytest.mark.parametrize(
    ("tags", "expected"),
    [
        ([], set()),
        (["O", "O"], set()),
        (["I-PER", "I-PER"], {(0, 2, "PER")}),
        (["I-PER", "B-PER"], {(0, 1, "PER"), (1, 2, "PER")}),
        (["B-PER", "I-PER", "O", "B-LOC"], {(0, 2, "PER"), (3, 4, "LOC")}),
        (["B-PER", "I-LOC"], {(0, 1, "PER"), (1, 2, "LOC")}),
        (["O", "I-NP-SBJ", "I-NP-SBJ"], {(1, 3, "NP-SBJ")}),
    ],
)
def test_chunks(tags: list[str], expected: set[tuple[int, int, str]]) -> None:
    assert chunks(tags) == expected


def test_chunks_are_those_of_seqeval() -> None:
    from seqeval.metrics.sequence_labeling import get_entities

    for tags in random_sentences(5000, seed=0):
        # seqeval counts the last word in.
        assert chunks(tags) == {(begin, last + 1, kind) for kind, begin, last in get_entities(tags)}


@pytest.mark.parametrize("seed", range(20))
def test_scores_are_those_of_seqeval(seed: int) -> None:
    from seqeval.metrics.sequence_labeling import precision_recall_fscore_support

    gold = random_sentences(200, seed)
    rng = random.Random(seed)
    predicted = [[tag if rng.random() < 0.8 else rng.choice(TAGS) for tag in tags] for tags in gold]
    precision, recall, f1, _ = precision_recall_fscore_support(gold, predicted, average="micro")
    scores = chunk_scores(gold, predicted)
    assert (scores.precision, scores.recall, scores.f1) == pytest.approx((precision, recall, f1))
    assert 0.2 < scores.f1 < 0.9


@pytest.mark.parametrize(
    ("gold", "predicted", "expected"),
    [
        ([["O"]], [["O"]], ChunkScores(0.0, 0.0, 0.0)),
        ([["I-PER"]], [["O"]], ChunkScores(0.0, 0.0, 0.0)),
        ([["O"]], [["I-PER"]], ChunkScores(0.0, 0.0, 0.0)),
        ([["I-PER"]], [["B-PER"]], ChunkScores(1.0, 1.0, 1.0)),
        ([], [], ChunkScores(0.0, 0.0, 0.0)),
    ],
)
def test_what_a_division_by_zero_gives(gold: list, predicted: list, expected: ChunkScores) -> None:
    assert chunk_scores(gold, predicted) == expected


def test_sentences_are_not_run_together() -> None:
    assert chunk_scores([["I-PER"], ["I-PER"]], [["I-PER"], ["O"]]) == ChunkScores(1.0, 0.5, 2 / 3)


def test_other_numbers_of_sentences_are_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        chunk_scores([["O"]], [])


def longest_phrases(train, test) -> list[list[str]]:
    """Tag the longest phrases that are known from training with the type that they had most often."""
    counts: dict[tuple[str, ...], dict[str, int]] = {}
    for words, tags in zip(train.words, train.tags["ner"], strict=True):
        for begin, end, kind in chunks(tags):
            kinds = counts.setdefault(tuple(words[begin:end]), {})
            kinds[kind] = kinds.get(kind, 0) + 1
    known = {phrase: min(kinds, key=lambda kind: (-kinds[kind], kind)) for phrase, kinds in counts.items()}
    longest = max(map(len, known))
    predicted = []
    for words in test.words:
        tags = ["O"] * len(words)
        place = 0
        while place < len(words):
            lengths = range(min(longest, len(words) - place), 0, -1)
            length = next((length for length in lengths if tuple(words[place : place + length]) in known), None)
            if length is not None:
                kind = known[tuple(words[place : place + length])]
                tags[place : place + length] = [f"B-{kind}", *[f"I-{kind}"] * (length - 1)]
            place += length or 1
        predicted.append(tags)
    return predicted


@pytest.mark.slow
def test_the_published_baseline(data_folder) -> None:
    # The shared task's own baseline; its scores stand in the last row of the paper's tables.
    splits = conll_splits(data_folder / "tokens" / "conll2003")
    train, test = read_conll(splits["train"]), read_conll(splits["test"])
    assert sum(len(chunks(tags)) for tags in train.tags["ner"]) == 23499
    scores = chunk_scores(test.tags["ner"], longest_phrases(train, test))
    assert [round(100 * value, 2) for value in (scores.precision, scores.recall, scores.f1)] == [71.91, 50.90, 59.61]
