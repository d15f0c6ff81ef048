import errno
import gc
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import gerund
from gerund.errors import ConfigError, DataError, ResourceError
from gerund.evaluation.run import evaluate
from gerund.evaluation.systems.language_model import LanguageModelSystem, language_model_system
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.systems.selection import systems_of
from gerund.evaluation.task import EvaluationConfig
from gerund.papers import token_labels
from gerund.papers.token_labels import (
    COLUMNS,
    RELEASED_TAGGER,
    Chunking,
    ChunkScores,
    NamedEntities,
    PartsOfSpeech,
    TokenTask,
    chunk_scores,
    chunks,
    conll_splits,
    read_conll,
    score_words,
    token_tags,
    train_taggers,
    word_states,
)
from gerund.settings.model_spec import parse_encoder_spec
from tests.evaluation.tables import FakeEncoder

# word, part of speech, phrase, name
WORDS = {
    "Ann": "NNP I-NP I-PER",
    "Bo": "NNP I-NP I-PER",
    "sees": "VBZ I-VP O",
    "hit": "VBD I-VP O",
    "the": "DT I-NP O",
    "cat": "NN I-NP O",
    "in": "IN I-PP O",
    "Rome": "NNP I-NP I-LOC",
    ".": ". O O",
}
# So wide and long that a few steps are enough.
WIDTH, LENGTH = 100, 50.0
STEPS = 400
SENTENCES = ["Ann sees the cat .", "Bo hit Ann in Rome .", "the cat sees Bo .", "Rome .", "Ann hit the cat in Rome ."]


class Spelling(FakeEncoder):
    """A word's vector is which word it is; remembers what it was asked."""

    dimensions = WIDTH

    def __init__(self) -> None:
        super().__init__("spelling")
        self.asked: list[tuple[list[list[str]], dict]] = []

    def encode_words(self, sentences: Sequence[Sequence[str]], **more) -> list[np.ndarray]:
        self.asked.append(([list(words) for words in sentences], more))
        table = LENGTH * np.eye(len(WORDS), WIDTH, dtype=np.float32)
        return [table[[list(WORDS).index(word) for word in one]] for one in sentences]


class Blind(Spelling):
    """Every word is the same."""

    def encode_words(self, sentences: Sequence[Sequence[str]], **more) -> list[np.ndarray]:
        return [np.ones((len(words), WIDTH), np.float32) for words in sentences]


def write(path: Path, sentences: list[str], tags: dict[str, str] = WORDS) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join("".join(f"{word} {tags[word]}\n" for word in one.split()) for one in sentences))
    return path


@pytest.fixture(autouse=True)
def _few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_labels, "train_taggers", partial(train_taggers, steps=STEPS))


def tagging_tasks(folder: Path) -> list[TokenTask]:
    return [task for kind in (Chunking, NamedEntities, PartsOfSpeech) for task in kind.find(folder)]


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, TokenTask]:
    folder = tmp_path / "tokens" / "toy"
    write(folder / "train.txt", SENTENCES * 2)
    write(folder / "valid.txt", SENTENCES[:3])
    write(folder / "test.txt", SENTENCES[1:])
    return {task.kind: task for task in tagging_tasks(tmp_path)}


def test_three_tasks_for_every_folder(tasks: dict[str, TokenTask], tmp_path: Path) -> None:
    assert [task.name for task in tasks.values()] == ["chunking/toy", "ner/toy", "pos/toy"]
    assert all(task.has_validation and task.side == "tokens" for task in tasks.values())
    assert [path.name for path in tasks["ner"].files] == ["train.txt", "valid.txt", "test.txt"]
    write(tmp_path / "tokens" / "another" / "eng.train", SENTENCES)
    assert len(tagging_tasks(tmp_path)) == 3
    write(tmp_path / "tokens" / "another" / "eng.testb", SENTENCES)
    (tmp_path / "tokens" / "notes.txt").write_text("no folder")
    found = tagging_tasks(tmp_path)
    assert [task.name for task in found][:2] == ["chunking/another", "chunking/toy"]
    assert not found[0].has_validation
    assert tagging_tasks(tmp_path / "none") == []


@pytest.mark.slow
def test_what_a_word_tells_is_learnt(tasks: dict[str, TokenTask]) -> None:
    spelling = Spelling()
    scores = {kind: task.run(spelling, EvaluationConfig()) for kind, task in tasks.items()}
    assert {kind: (score.main, score.size, score.notes) for kind, score in scores.items()} == {
        "chunking": ("f1", 4, ()),
        "ner": ("f1", 4, ()),
        "pos": ("accuracy", 4, ()),
    }
    assert scores["ner"].metrics == scores["chunking"].metrics == dict(f1=1.0, precision=1.0, recall=1.0, accuracy=1.0)
    assert scores["pos"].metrics == dict(accuracy=1.0, macro_f1=1.0)


@pytest.mark.slow
def test_words_are_read_once_for_all_three(tasks: dict[str, TokenTask]) -> None:
    spelling = Spelling()
    for task in tasks.values():
        assert task.is_measured(spelling, EvaluationConfig()) == (task.kind != "chunking")
        task.run(spelling, EvaluationConfig())
    [(sentences, how)] = spelling.asked
    assert sentences == tasks["pos"].sentences(EvaluationConfig())
    assert sentences == [one.split() for one in SENTENCES * 2 + SENTENCES[1:]]
    assert how["shift"] is False
    assert how["prompt"] is None


@pytest.mark.sweep(quick=0, check=2)
@pytest.mark.parametrize(
    "config",
    [
        EvaluationConfig(seed=1),
        EvaluationConfig(limit=3),
        EvaluationConfig(split="validation"),
        EvaluationConfig(prompts={"ner": "tag: "}),
    ],
)
def test_other_settings_are_measured_anew(tasks: dict[str, TokenTask], config: EvaluationConfig) -> None:
    spelling = Spelling()
    tasks["ner"].run(spelling, EvaluationConfig())
    assert not tasks["ner"].is_measured(spelling, config)
    tasks["ner"].run(spelling, config)
    assert len(spelling.asked) == 2
    assert spelling.asked[1][1]["prompt"] == config.prompts.get("ner")
    assert not tasks["ner"].is_measured(Spelling(), config)


@pytest.mark.slow
def test_changed_files_are_measured_anew(tasks: dict[str, TokenTask]) -> None:
    spelling = Spelling()
    assert tasks["ner"].run(spelling, EvaluationConfig()).size == 4
    path = write(tasks["ner"].files[2], SENTENCES)
    os.utime(path, ns=(1, 1))
    assert tasks["ner"].run(spelling, EvaluationConfig()).size == 5


@pytest.mark.slow
def test_nothing_is_kept_of_a_system_that_is_gone(tasks: dict[str, TokenTask]) -> None:
    gc.collect()
    before = len(token_labels._finished)
    spelling = Spelling()
    tasks["ner"].run(spelling, EvaluationConfig())
    assert len(token_labels._finished) == before + 1
    del spelling
    gc.collect()
    assert len(token_labels._finished) == before


@pytest.mark.slow
def test_a_limit_and_the_validation_split(tasks: dict[str, TokenTask]) -> None:
    spelling = Spelling()
    assert tasks["ner"].run(spelling, EvaluationConfig(limit=2)).size == 2
    assert spelling.asked[0][0] == [one.split() for one in SENTENCES[:2] + SENTENCES[1:3]]
    assert tasks["ner"].run(spelling, EvaluationConfig(split="validation")).size == 3
    assert spelling.asked[1][0] == [one.split() for one in SENTENCES * 2 + SENTENCES[:3]]


@pytest.mark.slow
def test_the_released_setting_labels_every_token(tasks: dict[str, TokenTask], tiny_folder: Path) -> None:
    """LBW's run_ner.py with label_all_tokens: B- on a name's first token, I- on the rest, F1 over tokens (seqeval)."""
    from seqeval.metrics import f1_score

    assert token_tags([[1, 3], [2]], [["I-LOC", "B-LOC"], ["B-PER"]]) == [
        ["B-LOC", "B-LOC", "I-LOC", "I-LOC"],
        ["B-PER", "I-PER"],
    ]
    lm = gerund.load(tiny_folder, attention="causal", dtype="float32")
    system = language_model_system("tiny", lm)
    task = replace(tasks["ner"], setting="released")
    score = task.run(system, EvaluationConfig(seed=5))
    # The slow way: a text at a time, tokens told apart by where they stand.
    sides = []
    for place in (0, 2):
        own = read_conll(task.files[place])
        states, tags = [], []
        for words, names in zip(own.words, own.tags["ner"], strict=True):
            text = " ".join(words)
            read = lm.tokenizer(text, return_offsets_mapping=True)
            starts = np.cumsum([0, *(len(word) + 1 for word in words)])
            # A token belongs to the word that its last character is in, and a space alone to none.
            kept = [row for row, (begin, end) in enumerate(read.offset_mapping) if text[begin:end].strip()]
            words_of = [int(np.searchsorted(starts, read.offset_mapping[row][1])) - 1 for row in kept]
            states.append(lm.encode_tokens([text])[0][kept])
            labels, before = [], -1
            for word in words_of:
                kind = names[word].partition("-")[2]
                labels.append("O" if not kind else f"{'B' if word != before else 'I'}-{kind}")
                before = word
            tags.append(labels)
        sides.append((np.concatenate(states), tags))
    [tagger] = train_taggers(sides[0][0], [sides[0][1]], seed=5, steps=400, training=RELEASED_TAGGER)
    flat = tagger.predict(sides[1][0])
    ends = np.cumsum([0, *map(len, sides[1][1])])
    predicted = [flat[begin:end] for begin, end in pairwise(ends)]
    assert score.size == 4
    # Beside the other columns its first weights are others, which 400 steps forget.
    assert score.value == pytest.approx(f1_score(sides[1][1], predicted), abs=0.02)
    assert task.sentences(EvaluationConfig()) == []


@pytest.mark.slow
def test_words_by_their_first_token(tasks: dict[str, TokenTask], tiny_folder: Path) -> None:
    first = replace(tasks["pos"], pooling="first")
    spelling = Spelling()
    tasks["pos"].run(spelling, EvaluationConfig())
    first.run(spelling, EvaluationConfig())
    assert [how["pooling"] for _, how in spelling.asked] == ["mean", "first"]
    # Side by side with other plans, the vectors are those of each alone.
    models = systems_of(
        [gerund.load(tiny_folder, dtype="float32")],
        [parse_encoder_spec(f"mask0-bidir:k={k}") for k in (1, 2)],
    )
    together = [one.score.value for one in evaluate(models, [first], EvaluationConfig()).results]
    assert together == [replace(first).run(one, EvaluationConfig(seed=0)).value for one in models]
    with pytest.raises(ConfigError, match="unknown pooling of words 'last'"):
        replace(first, pooling="last")
    with pytest.raises(ConfigError, match="setting=released labels tokens"):
        replace(first, setting="released")


@pytest.mark.slow
def test_the_setting_of_magnet_reads_the_outputs_before(tasks: dict[str, TokenTask], tiny_folder: Path) -> None:
    magnet = replace(tasks["pos"], setting="magnet")
    assert (magnet.shifts_words, tasks["pos"].shifts_words) == (True, False)
    spelling = Spelling()
    tasks["pos"].run(spelling, EvaluationConfig())
    magnet.run(spelling, EvaluationConfig())
    assert [how["shift"] for _, how in spelling.asked] == [False, True]
    system = language_model_system("tiny", gerund.load(tiny_folder, attention="causal"))
    assert tasks["pos"].run(system, EvaluationConfig()) != magnet.run(system, EvaluationConfig())
    with pytest.raises(ConfigError, match="unknown setting 'paper'; valid are: lbw, magnet"):
        replace(magnet, setting="paper")


@pytest.mark.slow
def test_words_that_all_look_the_same(tasks: dict[str, TokenTask]) -> None:
    blind = Blind()
    assert tasks["ner"].run(blind, EvaluationConfig()).metrics == pytest.approx(
        dict(f1=0.0, precision=0.0, recall=0.0, accuracy=13 / 20)
    )
    assert 0 < tasks["pos"].run(blind, EvaluationConfig()).value < 0.5


@pytest.mark.slow
def test_a_tag_that_training_lacks_counts_as_wrong(tasks: dict[str, TokenTask]) -> None:
    write(tasks["pos"].files[2], ["Ann sees ."], {**WORDS, "sees": "XX B-XP I-MISC"})
    spelling = Spelling()
    assert tasks["pos"].run(spelling, EvaluationConfig()).metrics == pytest.approx(dict(accuracy=2 / 3, macro_f1=0.5))
    assert tasks["ner"].run(spelling, EvaluationConfig()).metrics == pytest.approx(
        dict(f1=2 / 3, precision=1.0, recall=0.5, accuracy=2 / 3)
    )


@pytest.mark.slow
def test_words_beyond_the_models_limit_are_told(tasks: dict[str, TokenTask]) -> None:
    class Short(Spelling):
        def encode_words(self, sentences: Sequence[Sequence[str]], **more) -> list[np.ndarray]:
            vectors = super().encode_words(sentences, **more)
            for one in vectors:
                one[5:] = 0.0
            return vectors

    # One sentence has six words, one seven; the training sentences stand there twice, then those that are scored.
    score = tasks["ner"].run(Short(), EvaluationConfig())
    assert score.notes == ("9 words lie beyond the model's longest text and were read as zeros",)


def test_scoring_apart_from_encoding() -> None:
    tags = {column: [["O", "I-X"], ["O"]] for column in COLUMNS}
    vectors = LENGTH * np.eye(2, WIDTH, dtype=np.float32)[[0, 1, 0]]
    scores = score_words(vectors, tags, vectors, tags, seed=0)
    assert {column: score.value for column, score in scores.items()} == dict(pos=1.0, chunk=1.0, ner=1.0)
    for short in ((vectors[:2], vectors), (vectors, vectors[:2])):
        with pytest.raises(ValueError, match="2 word vectors for another number of tags"):
            score_words(short[0], tags, short[1], tags, seed=0)


def test_bad_input(tasks: dict[str, TokenTask], tmp_path: Path) -> None:
    task = tasks["ner"]
    with pytest.raises(ConfigError, match="can encode words, and bm25 can only rank documents"):
        evaluate([BM25System()], [task])
    task.files[1].unlink()
    assert not task.has_validation
    with pytest.raises(DataError, match=r"toy: there is no file of the validation split"):
        task.run(Spelling(), EvaluationConfig(split="validation"))
    task.files[2].write_text("Ann NNP I-NP\n")
    with pytest.raises(DataError, match=r"test.txt, line 1: expected a word and 3 tags"):
        task.run(Spelling(), EvaluationConfig())
    task.files[2].write_text("")
    with pytest.raises(DataError, match=r"test.txt: there is no sentence"):
        task.run(Spelling(), EvaluationConfig())


GOOD = """-DOCSTART- -X- O O

EU NNP I-NP I-ORG
rejects VBZ I-VP O

-DOCSTART- -X- -X- O

10\u00a0000 CD I-NP O
"""


def write_conll(folder: Path, text: str | bytes, name: str = "train.txt") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_sentences_and_tags(tmp_path: Path) -> None:
    sentences = read_conll(write_conll(tmp_path, GOOD))
    assert sentences.words == [["EU", "rejects"], ["10\u00a0000"]]
    assert sentences.tags == {
        "pos": [["NNP", "VBZ"], ["CD"]],
        "chunk": [["I-NP", "I-VP"], ["I-NP"]],
        "ner": [["I-ORG", "O"], ["O"]],
    }


@pytest.mark.parametrize(
    "text",
    [
        GOOD.rstrip(),  # no line break at the end
        GOOD.replace("\n", "\r\n"),
        "\ufeff" + GOOD,
        GOOD.replace(" ", "\t"),
        GOOD.replace("\n\n", "\n \n\n\n"),
        "\n\n" + GOOD,
        # Without a blank line after it.
        GOOD.replace("O O\n\n", "O O\n"),
    ],
)
def test_other_spellings_of_the_same(tmp_path: Path, text: str) -> None:
    assert read_conll(write_conll(tmp_path, text)) == read_conll(write_conll(tmp_path, GOOD, "other"))


def test_the_first_sentences(tmp_path: Path) -> None:
    sentences = read_conll(write_conll(tmp_path, GOOD))
    assert sentences.first(None) == sentences
    assert sentences.first(5) == sentences
    assert sentences.first(1).words == [["EU", "rejects"]]
    assert sentences.first(1).tags["ner"] == [["I-ORG", "O"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no sentence"),
        ("\n\n", "no sentence"),
        ("-DOCSTART- -X- O O\n\n", "no sentence"),
        (GOOD + "one two three\n", r"train.txt, line 9: expected a word and 3 tags \(pos, chunk, ner\), found 3"),
        (GOOD + "one CD I-NP O extra\n", "line 9: .*found 5"),
        (GOOD + "one\n", "line 9: .*found 1"),
        (GOOD + "one CD I-NP PER\n", "line 9: the ner tag 'PER' is none of O, B-TYPE and I-TYPE"),
        (GOOD + "one CD E-NP O\n", "line 9: the chunk tag 'E-NP'"),
        (GOOD + "one CD I- O\n", "line 9: the chunk tag 'I-'"),
        (GOOD + "\u00a0 CD I-NP O\n", "line 9: the word is white space"),
        (b"caf\xe9 NN I-NP O\n", "line 1: not valid UTF-8"),
    ],
)
def test_malformed_files_are_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_conll(write_conll(tmp_path, text))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.txt: no such file"):
        read_conll(tmp_path / "none.txt")


def test_splits_by_either_name(tmp_path: Path) -> None:
    assert conll_splits(tmp_path) == {}
    for name in ("test.txt", "eng.train", "valid.txt", "train.txt", "README"):
        write_conll(tmp_path, GOOD, name)
    assert conll_splits(tmp_path) == {
        "train": tmp_path / "eng.train",
        "validation": tmp_path / "valid.txt",
        "test": tmp_path / "test.txt",
    }


def test_official_counts(data_folder: Path) -> None:
    splits = conll_splits(data_folder / "tokens" / "conll2003")
    assert list(splits) == ["train", "validation", "test"]
    testb = read_conll(splits["test"])
    assert (len(testb.words), sum(map(len, testb.words))) == (3453, 46435)


READ = [
    ["EU", "rejects", "German", "call"],
    ["Peter", "Blackburn"],
    ["a"],
    ["the", "lamb", "."],
    ["in", "it"],
]


@pytest.fixture(scope="module")
def system(tiny_folder: Path) -> LanguageModelSystem:
    return language_model_system("tiny", gerund.load(tiny_folder, attention="causal", dtype="float32"))


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("most_bytes", [0, 1 << 30])
def test_words_of_all_sentences_in_their_order(
    system: LanguageModelSystem, shift: bool, most_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_labels, "_SENTENCES_AT_ONCE", 2)
    with word_states(system, READ, shift=shift, show=False, most_bytes=most_bytes) as vectors:
        assert isinstance(vectors, np.memmap) == (most_bytes == 0)
        assert vectors.dtype == np.float32
        alone = [system.encode_words([words], shift=shift)[0] for words in READ]
        np.testing.assert_allclose(vectors, np.concatenate(alone), atol=1e-5)
        other = np.concatenate(system.encode_words(READ, shift=not shift))
        assert not np.allclose(vectors, other, atol=1e-3)


def test_the_prompt_is_read(system: LanguageModelSystem) -> None:
    with word_states(system, READ, prompt="tag: ") as vectors:
        expected = np.concatenate(system.encode_words(READ, prompt="tag: "))
        np.testing.assert_allclose(vectors, expected, atol=1e-5)
        assert not np.allclose(vectors, np.concatenate(system.encode_words(READ)), atol=1e-3)


def test_the_file_is_gone_afterwards(
    system: LanguageModelSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with word_states(system, READ, most_bytes=0) as vectors:
        [path] = tmp_path.glob("*/states")
        assert path.stat().st_size == vectors.nbytes == 4 * 12 * system.lm.dimensions
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk(system: LanguageModelSystem, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None: ...

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    opener = Path.open
    monkeypatch.setattr(
        Path, "open", lambda path, *rest, **more: Full() if path.name == "states" else opener(path, *rest, **more)
    )
    message = rf"the words' vectors need 1 GB in {tmp_path}: No space left on device"
    with pytest.raises(ResourceError, match=message), word_states(system, READ, most_bytes=0):
        pass
    assert list(tmp_path.iterdir()) == []


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
