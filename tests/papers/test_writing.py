"""What a model writes, measured on tiny models and made-up documents, and once on a real one."""

import json
import lzma
import random
from dataclasses import replace

import numpy as np
import pytest

import gerund
from gerund.data.corpus import clean_text
from gerund.errors import ConfigError, DataError
from gerund.evaluation.run import evaluate, key_of
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.systems.search import BM25System
from gerund.evaluation.task import EvaluationConfig
from gerund.papers.generated_texts import (
    DECODINGS,
    Passage,
    Writing,
    _cut_up,
    mauve,
    rep_n,
    rep_sentences,
    rep_window,
    sentences_of,
)
from gerund.scoring.word_overlap import content_overlap, overlap
from gerund.settings.sampling import Rerank, Sampling

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


def test_a_loop_is_seen(tmp_path, system, monkeypatch):
    task = replace(corpus(tmp_path, [document(40, 0)]), samples=1)
    looped = replace(system.lm.generate("the", 2)[0], text=" so. so. so. so. so. so. so. so.")
    monkeypatch.setattr(type(system.lm), "generate", lambda *_, **__: [looped])
    metrics = task.run(system, EvaluationConfig()).metrics
    assert metrics["rep_4"] == pytest.approx(4 / 5)
    assert metrics["rep"] >= 7 / 8
    assert metrics["rep_sen"] == pytest.approx(7 / 8)


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


def test_compressed_corpora_are_read(tmp_path, system):
    (tmp_path / "lm").mkdir()
    path = tmp_path / "lm" / "tales.valid.jsonl.xz"
    path.write_bytes(lzma.compress(json.dumps({"text": document(40, 0)}).encode()))
    [task] = Writing.find(tmp_path)
    assert replace(task, prefix_words=3, max_new_tokens=6).run(system, EvaluationConfig(limit=1)).size == 1


@pytest.mark.slow
def test_a_real_model_repeats_itself_when_it_is_greedy(stories_folder, data_folder):
    [wiki] = [task for task in Writing.find(data_folder) if task.name == "writing/wiki"]
    task = replace(wiki, samples=12, prefix_words=8, max_new_tokens=60)
    system = language_model_system("stories", gerund.load(stories_folder))
    greedy, nucleus = (
        replace(task, decoding=name).run(system, EvaluationConfig()).metrics for name in ("greedy", "nucleus")
    )
    assert greedy["rep_1"] > nucleus["rep_1"]
    assert greedy["rep"] > greedy["human_rep"]


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
