"""What a model writes, measured on tiny models and made-up documents, and once on a real one."""

import json
import random
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.data.corpus import clean_text
from gerund.errors import ConfigError, DataError, MissingDependencyError
from gerund.evaluation.run import evaluate, key_of
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.task import EvaluationConfig
from gerund.papers.generated_texts import (
    DECODINGS,
    Passage,
    Writing,
    _cut_up,
    curve_area,
    divergence_curve,
    mauve,
    rep_n,
    rep_sentences,
    rep_window,
    sentences_of,
)
from gerund.scoring.word_overlap import STOP_WORDS, OverlapScorer, content_overlap, overlap, words_of
from gerund.settings.sampling import Rerank, Sampling
from tests.scoring.test_likelihood import slow_content_overlap

WORDS = ["the", "a", "cat", "hat", "in", "an", "inn", "thin", "man", "ran.", "here", "there.", "then", "other"]


def document(words, seed, paragraph=9):
    rng = random.Random(seed)
    chosen = [rng.choice(WORDS) for _ in range(words)]
    return "\n".join(" ".join(chosen[start : start + paragraph]) for start in range(0, words, paragraph))


def corpus(folder, texts, name="tales.test.jsonl"):
    path = folder / "lm" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    [task] = Writing.find(folder)
    return replace(task, prefix_words=3, max_new_tokens=6)


@pytest.fixture
def system(tiny_folder):
    return language_model_system("tiny", gerund.load(tiny_folder, attention="causal"))


def test_finds_a_task_for_every_corpus(tmp_path):
    assert Writing.find(tmp_path) == []
    (tmp_path / "lm").mkdir()
    for name in ("b.test.jsonl", "b.valid.jsonl.xz", "a.train.jsonl", "c.valid.txt", "d.test.txt", "x.tests.jsonl"):
        (tmp_path / "lm" / name).write_text("x")
    tasks = Writing.find(tmp_path)
    assert [task.name for task in tasks] == ["writing/b", "writing/c.valid", "writing/d"]
    assert [path.name for path in tasks[0].files] == ["b.test.jsonl", "b.valid.jsonl.xz"]
    assert [task.has_validation for task in tasks] == [True, False, False]


def test_the_validation_split_is_another_file(tmp_path, system):
    task = corpus(tmp_path, [document(40, 0)])
    (tmp_path / "lm" / "tales.valid.jsonl").write_text(json.dumps({"text": document(40, 1)}) + "\n", encoding="utf-8")
    [both] = Writing.find(tmp_path)
    both = replace(both, prefix_words=3, max_new_tokens=6, samples=2)
    assert both.run(system, EvaluationConfig()) == replace(task, samples=2).run(system, EvaluationConfig())
    validation = EvaluationConfig(split="validation")
    assert both.passages(2, validation) == replace(task, files=both.files[1:]).passages(2, EvaluationConfig())
    assert both.passages(2, validation) != both.passages(2, EvaluationConfig())


def test_metrics_are_means_over_what_was_written(tmp_path, system):
    task = corpus(tmp_path, [document(40, seed) for seed in range(5)])
    score = replace(task, samples=8, decoding="ancestral").run(system, EvaluationConfig(seed=3))
    passages, _ = replace(task, samples=8).passages(8, EvaluationConfig(seed=3))
    sampling = Sampling(temperature=1.0, seed=range(3 * 1_000_003, 3 * 1_000_003 + 8))
    written = system.lm.generate([passage.prefix for passage in passages], 6, sampling)
    rows = []
    for passage, one in zip(passages, written, strict=True):
        words, before = one.text.split(), passage.prefix.split()
        rows.append({
            **{f"rep_{n}": rep_n(words, n) for n in (1, 2, 3, 4)},
            "rep_sen": rep_sentences(sentences_of(one.text)),
            "rep": rep_window(words, before),
            "overlap": overlap(words, before),
            "content_overlap": content_overlap(one.text, passage.prefix),
            "length": len(one.token_ids),
            "ended": one.finished,
        })  # fmt: skip
    for name in rows[0]:
        assert score.metrics[name] == pytest.approx(np.mean([row[name] for row in rows])), name
    assert (score.main, score.size, score.runs) == ("rep_4", 8, 1)
    assert "mauve" not in score.metrics
    assert any("at least 100" in note for note in score.notes)
    assert "8 continuations of at most 6 tokens by ancestral decoding" in score.notes[0]


def test_peoples_continuations_are_cut_to_the_models_length(tmp_path, system):
    task = corpus(tmp_path, ["a cat in the hat in the hat in the hat in the hat"])
    score = replace(task, samples=1, max_new_tokens=9).run(system, EvaluationConfig())
    passage = next(_cut_up("a cat in the hat in the hat in the hat in the hat", 3, 9))
    ids = system.lm.tokenizer(passage.rest).input_ids[1:]  # a beginning token goes first
    own = system.lm.tokenizer.decode(ids[: max(1, round(score.metrics["length"]))])
    assert passage.rest.startswith(own)
    assert score.metrics["human_rep_1"] == pytest.approx(rep_n(own.split(), 1))
    assert score.metrics["human_overlap"] == pytest.approx(overlap(own.split(), passage.prefix.split()))


def test_both_sides_end_at_a_sentence(tmp_path, system):
    """RankGen, appendix D.1, item 3."""
    task = replace(corpus(tmp_path, [document(45, seed) for seed in range(9)]), samples=5, ends="sentence")
    passages = [
        Passage("He left", f" {rest}") for rest in ("and ran. Then he", "and. So it is there. A", "here and there")
    ]
    texts = [" then. The other one. A hat", " in the inn", " An end."]
    ids = [system.lm.tokenizer(text)["input_ids"] for text in texts]
    written = [gerund.Generation(text, own, 0.0, False) for text, own in zip(texts, ids, strict=True)]
    found = task.compare(system.lm, passages, written)
    kept = [" then. The other one.", " in the inn", " An end."]  # one without an end stays as it is
    assert found.metrics["rep_1"] == pytest.approx(np.mean([rep_n(text.split(), 1) for text in kept]))
    assert found.metrics["overlap"] == pytest.approx(np.mean([overlap(text.split(), ["He", "left"]) for text in kept]))
    assert task._ended([passage.rest for passage in passages]) == [
        " and ran.",
        " and. So it is there.",
        " here and there",
    ]
    assert replace(task, ends="token")._ended(texts) == texts
    with pytest.raises(ConfigError, match="unknown ends 'word'"):
        replace(task, ends="word")


@pytest.mark.slow
@pytest.mark.parametrize("states", ["mean", "last"])
def test_mauve_from_a_hundred_texts_on(tmp_path, system, states):
    task = corpus(tmp_path, [document(45, seed) for seed in range(60)])
    task = replace(task, samples=100, max_new_tokens=6, mauve_states=states)
    score = task.run(system, EvaluationConfig())
    passages, others = task.passages(100, EvaluationConfig())
    written = task.write(system.lm, [passage.prefix for passage in passages], EvaluationConfig())
    raw = {"dtype": "float32", "text_normalization": "none"}
    runtime = gerund.load(system.lm.name, attention="causal", pooling=states, **raw)

    def vectors(items, texts):
        before = [item.prefix if states == "last" else "" for item in items]
        return runtime.encode([a + b for a, b in zip(before, texts, strict=True)], normalize=False, empty="zeros")

    def cut(items):
        rows = zip(items, written, strict=True)
        ids = [(system.lm.tokenizer(item.rest).input_ids[1:], max(1, len(one.token_ids))) for item, one in rows]
        return [system.lm.tokenizer.decode(own[:length]) for own, length in ids]

    people = vectors(passages, cut(passages))
    expected = mauve(vectors(passages, [one.text for one in written]), people)
    assert score.metrics["mauve"] == pytest.approx(expected.value, abs=1e-6)
    assert score.metrics["mauve_spread"] == pytest.approx(expected.spread, abs=1e-6)
    assert score.metrics["mauve_ceiling"] == pytest.approx(mauve(vectors(others, cut(others)), people).value, abs=1e-6)
    # A model with random weights is no person.
    assert score.metrics["mauve"] < score.metrics["mauve_ceiling"] - 0.2
    assert any(f"by the {states} states of" in note and "10 buckets" in note for note in score.notes)
    assert any("100 texts a side is rough" in note for note in score.notes)


@pytest.mark.slow
def test_a_small_corpus_gives_what_it_has(tmp_path, system):
    task = corpus(tmp_path, [document(45, seed) for seed in range(24)])
    score = replace(task, samples=150, mauve_features="").run(system, EvaluationConfig())
    assert score.size == 120
    assert {"mauve", "mauve_ceiling"} & set(score.metrics) == {"mauve"}
    assert any("no more than 120 passages" in note for note in score.notes)
    assert any("no ceiling" in note for note in score.notes)


@pytest.mark.slow
def test_mauves_states_may_be_another_models(tmp_path, system, tiny_folder):
    task = replace(corpus(tmp_path, [document(45, seed) for seed in range(24)]), samples=100)
    own = task.run(system, EvaluationConfig())
    assert replace(task, mauve_features=str(tiny_folder)).run(system, EvaluationConfig()).metrics == own.metrics
    others = replace(task, mauve_features="default").run(system, EvaluationConfig())
    assert others.metrics["mauve"] != own.metrics["mauve"]
    assert {name: value for name, value in others.metrics.items() if "mauve" not in name} == {
        name: value for name, value in own.metrics.items() if "mauve" not in name
    }


def test_the_seed_decides_passages_and_samples(tmp_path, system):
    task = replace(corpus(tmp_path, [document(40, seed) for seed in range(9)]), samples=40)
    assert task.run(system, EvaluationConfig()) == task.run(system, EvaluationConfig())
    assert task.run(system, EvaluationConfig()).metrics != task.run(system, EvaluationConfig(seed=1)).metrics
    assert task.passages(3, EvaluationConfig()) != task.passages(3, EvaluationConfig(seed=1))
    # Equal prefixes in two batches must not be continued alike.
    written = task.write(system.lm, ["the cat"] * 33, EvaluationConfig())
    assert len({one.text for one in written}) > 30


@pytest.mark.parametrize(
    ("decoding", "sampling"),
    [
        ("greedy", Sampling()),
        ("ancestral", Sampling(temperature=1, seed=range(3))),
        ("nucleus", Sampling(temperature=1, top_p=0.9, seed=range(3))),
        ("top-k", Sampling(temperature=1, top_k=40, seed=range(3))),
        ("typical", Sampling(temperature=1, typical_p=0.9, seed=range(3))),
    ],
)
def test_decodings_sample_as_they_are_called(system, decoding, sampling):
    task = Writing(name="writing/x", decoding=decoding, max_new_tokens=20)
    prompts = ["the", "a cat", "in an inn"]
    assert task.write(system.lm, prompts, EvaluationConfig()) == system.lm.generate(prompts, 20, sampling)
    if decoding != "ancestral":
        assert task.write(system.lm, prompts, EvaluationConfig()) != system.lm.generate(
            prompts, 20, Sampling(temperature=1, seed=range(3))
        )
    assert set(DECODINGS) == {"greedy", "ancestral", "nucleus", "top-k", "typical"}


def test_the_plan_does_not_matter(tmp_path, system):
    task = replace(corpus(tmp_path, [document(40, seed) for seed in range(9)]), samples=9)
    other = language_model_system("other", gerund.load(system.lm.name, attention="bidir", pooling="last"))
    assert task.run(other, EvaluationConfig()) == task.run(system, EvaluationConfig())
    assert key_of(task, other, EvaluationConfig()) == key_of(task, system, EvaluationConfig())


def test_limit_counts_continuations(tmp_path, system):
    task = corpus(tmp_path, [document(40, seed) for seed in range(9)])
    assert task.run(system, EvaluationConfig(limit=4)).size == 4
    assert replace(task, samples=2).run(system, EvaluationConfig(limit=4)).size == 2


def test_every_document_gives_its_beginning_before_any_gives_more(tmp_path):
    texts = [document(12, seed) for seed in range(6)] + [document(200, 99)]
    task = corpus(tmp_path, texts)
    passages, others = task.passages(3, EvaluationConfig())  # a pool of six, out of seven documents
    assert len(passages) == len(others) == 3
    starts = {" ".join(text.split()[:3]) for text in texts}
    assert {" ".join(item.prefix.split()) for item in passages + others} <= starts
    many, none = task.passages(20, EvaluationConfig())
    assert (len(many), none) == (20, [])


def test_passages_begin_with_paragraphs_and_do_not_overlap():
    text = document(200, 0, paragraph=13)
    pieces = list(_cut_up(text, 3, 6))
    assert len(pieces) == 200 // 13
    place = 0
    for piece in pieces:
        found = text.index(piece.prefix + piece.rest, place)
        assert found == 0 or text[found - 1] == "\n"
        assert (len(piece.prefix.split()), len(piece.rest.split())) == (3, 6)
        assert piece.rest[0].isspace()
        place = found + len(piece.prefix + piece.rest)
    # One long line is cut where the last piece ended.
    assert len(list(_cut_up(" ".join(text.split()), 3, 6))) == 200 // 9
    assert list(_cut_up("too short", 3, 6)) == []


@pytest.mark.parametrize(
    ("name", "style"), [("books.test.jsonl", "gutenberg"), ("wiki.test.jsonl", "wikipedia"), ("x.test.jsonl", "none")]
)
def test_known_corpora_are_cleaned(tmp_path, name, style):
    raw = "_Very_ odd ( , ) things here\nthat go on and on for a while, in long lines"
    task = corpus(tmp_path, [raw], name)
    [passage], _ = task.passages(1, EvaluationConfig())
    assert clean_text(raw, style).startswith(passage.prefix + passage.rest)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"decoding": "beam"}, "nucleus, greedy, ancestral, top-k, typical"),
        ({"mauve_states": "first"}, "mean, last"),
        ({"samples": 0}, "writing.samples=0"),
        ({"prefix_words": 0}, "prefix_words=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ],
)
def test_impossible_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        Writing(name="writing/x", **options)


def test_bad_corpora_are_refused(tmp_path, system):
    task = corpus(tmp_path, [document(40, 0)])
    with pytest.raises(DataError, match="no document has 3 words and 500 more"):
        replace(task, max_new_tokens=500).run(system, EvaluationConfig())
    task.files[0].write_text('{"text": "a b c d"}\nnonsense\n')
    with pytest.raises(DataError, match=r"tales.test.jsonl, line 2: not valid JSON"):
        task.run(system, EvaluationConfig())
    with pytest.raises(ConfigError, match="can generate texts, and bm25 can only rank documents"):
        evaluate([BM25System()], [corpus(tmp_path, [document(40, 0)])])


@pytest.mark.slow
def test_what_a_scorer_likes_best_is_kept(tmp_path, system):
    task = replace(corpus(tmp_path, [document(40, seed) for seed in range(4)]), samples=4)
    ranking = {"rerank": "avg_cll", "rerank_samples": 4, "rerank_beams": 2, "rerank_every": 2}
    beams = replace(task, **ranking).run(system, EvaluationConfig())
    assert "nucleus decoding, 4 ranked by avg_cll, 2 kept every 2 tokens;" in beams.notes[0]
    passages, _ = task.passages(4, EvaluationConfig())
    prompts = [passage.prefix for passage in passages]
    rerank = Rerank(12, scorer="avg_cll")
    expected = system.lm.generate(prompts, 6, Sampling(1.0, top_p=0.9, seed=range(len(prompts))), rerank=rerank)
    found = replace(task, rerank="avg_cll", rerank_samples=12).write(system.lm, prompts, EvaluationConfig())
    assert found == expected
    plain = task.write(system.lm, prompts, EvaluationConfig())
    for prompt, one, other in zip(prompts, found, plain, strict=True):
        [[score]] = system.lm.score([prompt], [[other.text]], "avg_cll")
        assert one.rank_score >= score - 1e-4
    assert [one.text for one in found] != [one.text for one in plain]


def test_ranking_that_cannot_be(tmp_path, system):
    task = corpus(tmp_path, [document(40, 0)])
    with pytest.raises(ConfigError, match="greedy writes the same text"):
        replace(task, decoding="greedy", rerank="pmi")
    with pytest.raises(ConfigError, match="rerank_beams=0"):
        replace(task, rerank_beams=0)
    with pytest.raises(ConfigError, match="was not trained to score"):
        replace(task, rerank="own", samples=1).run(system, EvaluationConfig())


def stories(folder, count, name="tales.jsonl"):
    path = folder / "suffix" / name
    path.parent.mkdir(exist_ok=True)
    rows = [
        {
            "sentences": [f"The cat ran to {n}.", "A man.", "An inn.", "The hat."],
            "endings": ["No.", f"End {n}."],
            "gold": 1,
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows


def test_a_story_is_continued_from_its_first_sentence(tmp_path, system):
    rows = stories(tmp_path, 9)
    (tmp_path / "suffix" / "other.jsonl").write_text('{"prefix": "a", "suffixes": ["b", "c"], "gold": 0}\n', "utf-8")
    [task] = Writing.find(tmp_path)
    assert task.name == "writing/tales"
    passages, others = task.passages(9, EvaluationConfig(seed=4))
    assert others == []
    assert sorted(passages, key=lambda one: one.prefix) == [
        Passage(row["sentences"][0], f" A man. An inn. The hat. {row['endings'][1]}") for row in rows
    ]
    assert task.passages(4, EvaluationConfig(seed=4))[0] == passages[:4]
    assert task.passages(9, EvaluationConfig(seed=5))[0] != passages
    task = replace(task, samples=5, max_new_tokens=6, decoding="greedy")
    score = task.run(system, EvaluationConfig(seed=4))
    written = system.lm.generate([passage.prefix for passage in passages[:5]], 6)
    repeated = [rep_sentences(sentences_of(one.text)) for one in written]
    assert score.metrics["rep_sen"] == pytest.approx(np.mean(repeated))
    assert score.size == 5
    assert score.notes[-1] == "MAUVE was left out: the stories end before the model does"


def test_no_mauve_of_stories_however_many_there_are(tmp_path, system, monkeypatch):
    monkeypatch.setattr("gerund.papers.generated_texts.require_scikit_learn", None)
    stories(tmp_path, 120)
    [task] = Writing.find(tmp_path)
    score = replace(task, samples=120, max_new_tokens=2).run(system, EvaluationConfig())
    assert score.size == 120
    assert not [name for name in score.metrics if name.startswith("mauve")]


# Counts of two histograms and what mauve-text 0.4.0 says of them.
LIBRARY = [
    ([8, 4, 12, 6, 11, 13, 7, 8, 13, 8, 19, 11], [7, 12, 9, 10, 12, 17, 5, 10, 12, 10, 9, 7], 0.967220966167231),
    ([3, 4, 10, 11, 10, 5, 12, 14, 18, 12, 12, 9], [30, 36, 6, 2, 5, 16, 11, 2, 0, 1, 0, 11], 0.173649470155883),
    ([15, 13, 13, 19, 6, 16, 22, 11, 4, 1, 6, 4, 5, 15, 0], [0, 0, 2, 0, 0, 0, 0, 0, 28, 46, 1, 16, 3, 1, 53],
     0.016304833025246677),
    ([6, 15, 11, 7, 5, 12, 11, 7, 12, 8, 12, 4, 14, 14, 17, 8, 11, 12, 7, 7],
     [12, 3, 12, 16, 9, 5, 5, 4, 9, 7, 5, 13, 18, 11, 6, 21, 12, 8, 17, 7], 0.8480782199718979),
]  # fmt: skip
# Mean and standard deviation over five k-means seeds of mauve-text 0.4.0 (its k-means starts otherwise): n, size,
# shift, seed of ``clouds``.
LIBRARY_CLOUDS = {
    (200, 16, 0.0, 0): (0.9697, 0.0182),
    (200, 16, 0.2, 1): (0.8785, 0.0140),
    (200, 16, 0.5, 2): (0.2293, 0.0360),
    (500, 16, 0.2, 0): (0.8406, 0.0262),
    (500, 64, 0.3, 0): (0.3741, 0.0267),
}


def clouds(n, size, shift, seed=0):
    """Sample two sets of vectors from normal distributions, the second shifted in every direction."""
    generator = np.random.default_rng(seed)
    return generator.standard_normal((n, size)), generator.standard_normal((n, size)) + shift


def histogram(counts):
    return np.array(counts) / sum(counts)


@pytest.mark.parametrize(("p", "q", "value"), LIBRARY)
def test_equal_histograms_give_the_librarys_value(p, q, value):
    assert curve_area(divergence_curve(histogram(p), histogram(q))) == pytest.approx(value, abs=1e-12)


@pytest.mark.parametrize(("cloud", "library"), LIBRARY_CLOUDS.items())
def test_vectors_give_about_what_the_library_gives(cloud, library):
    result = mauve(*clouds(*cloud))
    mean, spread = library
    assert abs(result.value - mean) < 2.5 * (result.spread + spread)
    assert result.buckets == cloud[0] // 10
    assert result.n == cloud[0]


@pytest.mark.slow
def test_value_spread_and_curve_belong_together():
    p, q = clouds(120, 8, 0.4)
    result = mauve(p, q)
    alone = [mauve(p, q, seeds=1, first_seed=seed) for seed in range(5)]
    values = [one.value for one in alone]
    assert result.value == pytest.approx(np.mean(values))
    assert result.spread == pytest.approx(np.std(values))
    assert result.spread > 0 == alone[0].spread
    assert curve_area(result.curve) == pytest.approx(np.median(values))
    assert mauve(p, q).value == result.value


def test_length_of_vectors_does_not_matter():
    p, q = clouds(120, 8, 0.4)
    longer = np.random.default_rng(1).uniform(0.1, 10, size=(120, 1))
    assert mauve(p * longer, q).value == pytest.approx(mauve(p, q).value, abs=1e-9)


def test_the_longer_side_is_cut_and_few_texts_are_noted():
    p, q = clouds(160, 8, 0.4)
    cut = mauve(p, q[:120])
    assert (cut.n, cut.buckets) == (120, 12)
    assert cut.value == mauve(p[:120], q[:120]).value
    [note] = cut.notes
    assert "120 texts" in note
    assert mauve(*clouds(500, 4, 0.0), seeds=1).notes == ()


@pytest.mark.slow
def test_equal_texts_everywhere():
    """A model that writes one and the same text shares one bucket at most with people; all alike is equal."""
    p, q = clouds(120, 8, 0.0)
    stuck = np.repeat(p[:1], 120, axis=0)
    assert mauve(stuck, q).value < 0.1
    assert mauve(stuck, stuck).value == pytest.approx(1.0)
    silent = np.zeros((120, 8))
    assert mauve(silent, q).value < 0.05


@pytest.mark.parametrize(
    ("p", "q", "error", "words"),
    [
        (np.ones((99, 4)), np.ones((500, 4)), DataError, "99 and 500 texts"),
        (np.ones((120, 4)), np.ones((120, 5)), ConfigError, r"\(120, 4\) and \(120, 5\)"),
        (np.ones(120), np.ones((120, 5)), ConfigError, "one size"),
        (np.ones((120, 4)), np.full((120, 4), np.nan), DataError, "not finite"),
    ],
)
def test_what_cannot_be_compared_is_refused(p, q, error, words):
    with pytest.raises(error, match=words):
        mauve(p, q)


def test_without_scikit_learn_the_message_has_the_pip_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'gerund\[eval\]'"):
        mauve(*clouds(120, 4, 0.0))


def texts():
    """Yield random short texts over few words, so that much repeats."""
    draw = random.Random(0)
    for _ in range(60):
        yield [draw.choice("abcde") for _ in range(draw.randrange(1, 40))]


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_rep_n_counts_every_gram_beyond_its_first(n):
    for words in texts():
        grams = Counter(" ".join(words[start : start + n]) for start in range(len(words)) if start + n <= len(words))
        again = sum(count - 1 for count in grams.values())
        assert rep_n(words, n) == pytest.approx(again / grams.total() if grams else 0.0)


@pytest.mark.parametrize("window", [1, 3, 20])
def test_rep_window_looks_back_into_the_prefix(window):
    for words in texts():
        cut = len(words) // 3
        copied = 0
        for place in range(cut, len(words)):
            before = [words[other] for other in range(len(words)) if place - window <= other < place]
            copied += words[place] in before
        assert rep_window(words[cut:], words[:cut], window=window) == pytest.approx(copied / (len(words) - cut))


def test_overlap_counts_occurrences():
    for words in texts():
        cut = len(words) // 3
        hits = [word for word in words[cut:] if words[:cut].count(word) > 0]
        assert overlap(words[cut:], words[:cut]) == pytest.approx(len(hits) / len(words[cut:]))


def test_measures_take_token_ids_as_well():
    assert rep_n([5, 6, 5, 6], 2) == pytest.approx(1 / 3)
    assert rep_window([5, 6, 5], [6]) == pytest.approx(2 / 3)
    assert overlap([5, 6], [6]) == 0.5


def test_nothing_and_too_little_do_not_repeat():
    assert rep_n([], 1) == rep_n(["a", "a", "a"], 4) == 0
    assert rep_sentences([]) == rep_sentences(["One."]) == 0
    assert rep_window([]) == rep_window([], ["a"]) == rep_window(["a"]) == 0
    assert overlap([], ["a"]) == overlap(["a"], []) == 0


def test_a_loop_is_nearly_all_repetition():
    words = ["so", "it", "goes"] * 100
    assert rep_n(words, 4) > 0.98
    assert rep_window(words) == pytest.approx(297 / 300)
    assert rep_sentences(sentences_of("He was a king. " * 50)) == pytest.approx(49 / 50)


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", []),
        (" \n ", []),
        ("One", ["One"]),
        ("It cost 3.50 dollars.\n\n\nMr. Smith paid.", ["It cost 3.50 dollars.", "Mr. Smith paid."]),
        (" leading space. Then more! ", ["leading space.", "Then more!"]),
    ],
)
def test_sentences(text, sentences):
    assert sentences_of(text) == sentences


def test_words_keep_case_and_punctuation():
    assert words_of(" The the\nthe. ") == ["The", "the", "the."]


def test_overlap_without_stop_words_is_the_released_count():
    draw = random.Random(1)
    words = ["The", "the", "dog", "Dog,", "dog's", "cat", "--", "It's", "not", "over", "a", "sea.", "SEA", "an-end"]
    for _ in range(300):
        candidate, prefix = (" ".join(draw.choices(words, k=draw.randrange(12))) for _ in range(2))
        assert content_overlap(candidate, prefix) == pytest.approx(slow_content_overlap(candidate, prefix))
    # NLTK's list as RankGen used it: 179 words, of which 26 have an apostrophe.
    assert len(STOP_WORDS) == 153
    own = OverlapScorer("content_overlap")
    assert own.name == "content_overlap"
    assert own.score(["The dog saw the sea."], [[" The sea, the sky.", " And the."]]) == [[0.5, 0.0]]


def test_overlap_is_of_texts_as_they_read():
    alike = {
        "Zürich im Mai": "Zu\u0308rich im Mai",
        "photo\u00adsynthesis": "photosynthesis",
        "ef\ufb01cient": "efficient",
    }
    for one, other in alike.items():
        assert overlap(words_of(one), words_of(other)) == 1
        assert content_overlap(one, other) == 1
    assert OverlapScorer().score(["東京は首都です"], [["首都は東京です", "富士"]]) == [[1.0, 0.0]]
