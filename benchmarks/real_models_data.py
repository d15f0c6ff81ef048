"""What `real_models.py` measures on: samples of the shared sets, one for choosing and one for reporting, and scores.

The two stages share no pair, query or labelled text; documents of a collection may be in both, which nothing is learnt
from. Every score comes with its examples, so that intervals can be had.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gerund.evaluation.data_files import read_labelled, read_scored_pairs
from gerund.evaluation.task import Examples

COLLECTIONS = ("cranfield", "medline", "cisi")
GROUPS = ("pairs", "retrieval", "classification", "tokens")
Vectors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Sizes:
    """How much of each set a stage reads."""

    pairs: Mapping[str, int]  # of each file of `sts/`
    queries: Mapping[str, int]  # of each collection
    relevant: int  # judged documents kept a query at most
    documents: int  # of each collection, the relevant ones among them where they fit
    words: int  # of a document, from its beginning
    labelled: int  # texts of each intent
    sentences: int  # of words with their tags, for training and for testing


DEV = Sizes({"stsb.dev": 150}, {"cranfield": 12, "medline": 6, "cisi": 8}, 5, 40, 45, 3, 60)
TEST = Sizes(
    {"stsb.test": 250, "sts13.test": 80, "sts14.test": 80},
    {"cranfield": 24, "medline": 14, "cisi": 16}, 5, 70, 45, 6, 60,
)  # fmt: skip
QUICK = Sizes({"stsb.dev": 12}, {"medline": 2}, 2, 6, 20, 2, 6)


@dataclass
class Collection:
    """Documents, queries and judgements by id."""

    documents: dict[str, str]
    queries: dict[str, str]
    judged: dict[str, dict[str, int]]


@dataclass
class Stage:
    """Everything that one stage reads; `lists` are the texts by name, in the order of the vectors."""

    name: str
    sizes: Sizes
    lists: dict[str, list[str]] = field(default_factory=dict)
    ratings: dict[str, np.ndarray] = field(default_factory=dict)
    collections: dict[str, Collection] = field(default_factory=dict)
    labels: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=int))
    folds: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=int))
    words: list[list[str]] = field(default_factory=list)
    tags: dict[str, list[str]] = field(default_factory=dict)
    trained_words: int = 0

    def described(self) -> dict[str, Any]:
        """Return what was sampled, in numbers."""
        return {
            "pairs": {name: len(own) for name, own in self.ratings.items()},
            "queries": {name: len(own.queries) for name, own in self.collections.items()},
            "documents": {name: len(own.documents) for name, own in self.collections.items()},
            "words of a document": self.sizes.words,
            "labelled texts": len(self.labels),
            "sentences with tags": len(self.words),
        }


def sampled(data: Path, name: str, sizes: Sizes, seed: int = 0) -> Stage:
    """Return a stage's samples; `name` is `dev` or `test`."""
    rng = np.random.default_rng(seed)
    stage = Stage(name, sizes)
    for file, count in sizes.pairs.items():
        pairs = read_scored_pairs(data / "sts" / f"{file}.tsv")
        rows = sorted(rng.permutation(len(pairs.left))[:count].tolist())
        stage.lists[f"{file} left"] = [pairs.left[row] for row in rows]
        stage.lists[f"{file} right"] = [pairs.right[row] for row in rows]
        stage.ratings[file] = np.array([pairs.ratings[row] for row in rows])
    for collection, count in sizes.queries.items():
        own = _collection(data / "retrieval" / collection, name, count, sizes, rng)
        stage.collections[collection] = own
        stage.lists[f"{collection} documents"] = list(own.documents.values())
        stage.lists[f"{collection} queries"] = list(own.queries.values())
    _intents(stage, data)
    _tagged(stage, data / "tokens" / "conll2003", rng)
    return stage


def _collection(folder: Path, stage: str, count: int, sizes: Sizes, rng: np.random.Generator) -> Collection:
    documents = {}
    for line in (folder / "corpus.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        text = (
            row["text"] if row["text"].startswith(row.get("title") or " ") else f"{row.get('title', '')} {row['text']}"
        )
        if text.strip():
            documents[row["_id"]] = " ".join(text.split()[: sizes.words])
    queries = [json.loads(line) for line in (folder / "queries.jsonl").read_text(encoding="utf-8").splitlines()]
    judged: dict[str, dict[str, int]] = {}
    for line in (folder / "qrels" / "test.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        query, document, grade = line.split("\t")
        if int(grade) > 0 and document in documents:
            judged.setdefault(query, {})[document] = int(grade)
    known = sorted(row["_id"] for row in queries if row["_id"] in judged)
    # A third of the queries is for choosing, whatever the stage takes of it.
    order = np.random.default_rng(1).permutation(len(known)).tolist()
    third = len(known) // 3
    mine = [known[place] for place in (order[:third] if stage == "dev" else order[third:])][:count]
    kept: dict[str, dict[str, int]] = {}
    for query in mine:
        relevant = sorted(judged[query], key=lambda one: (-judged[query][one], one))
        kept[query] = {one: judged[query][one] for one in relevant[: sizes.relevant]}
    # A judged document that was left out is no distractor either.
    barred = {one for query in mine for one in judged[query]}
    pool = list(dict.fromkeys(one for own in kept.values() for one in own))
    others = [one for one in sorted(documents) if one not in barred]
    room = max(10, sizes.documents - len(pool))
    pool += [others[place] for place in rng.permutation(len(others))[:room].tolist()]
    texts = {row["_id"]: row["text"] for row in queries}
    return Collection({one: documents[one] for one in pool}, {query: texts[query] for query in mine}, kept)


def _intents(stage: Stage, data: Path) -> None:
    """Sample intents: the folds of a dev stage are of the training file, those of a test stage train and test."""
    folder, count = data / "classification" / "banking77", stage.sizes.labelled
    parts = ("train",) if stage.name == "dev" else ("train", "test")
    texts, labels, folds = list[str](), list[str](), list[int]()
    for number, part in enumerate(parts):
        read = read_labelled(folder / f"{part}.jsonl")
        by_label: dict[str, list[int]] = {}
        # What the dev stage takes is the beginning of this order, and the test stage leaves it out.
        for row in np.random.default_rng(2).permutation(len(read.texts)).tolist():
            by_label.setdefault(str(read.labels[row]), []).append(row)
        first = DEV.labelled if stage.name == "test" and part == "train" else 0
        for label in sorted(by_label):
            own = by_label[label][first : first + (count if part == "train" else max(2, count // 3))]
            texts += [read.texts[row] for row in own]
            labels += [label] * len(own)
            folds += [place % 2 if stage.name == "dev" else number for place in range(len(own))]
    names = {label: number for number, label in enumerate(sorted(set(labels)))}
    stage.lists["intents"] = texts
    stage.labels, stage.folds = np.array([names[label] for label in labels]), np.array(folds)


def _tagged(stage: Stage, folder: Path, rng: np.random.Generator) -> None:
    files = ("eng.train", "eng.testa" if stage.name == "dev" else "eng.testb")
    tags: dict[str, list[str]] = {"parts of speech": [], "names": []}
    for number, file in enumerate(files):
        blocks = (folder / file).read_text(encoding="utf-8").split("\n\n")
        sentences = [[line.split() for line in block.splitlines() if line.strip()] for block in blocks]
        fit = [own for own in sentences if own and own[0][0] != "-DOCSTART-" and 4 <= len(own) <= 25]
        for row in sorted(rng.permutation(len(fit))[: stage.sizes.sentences].tolist()):
            stage.words.append([fields[0] for fields in fit[row]])
            tags["parts of speech"] += [fields[1] for fields in fit[row]]
            tags["names"] += [fields[3].rpartition("-")[2] for fields in fit[row]]
            stage.trained_words += len(fit[row]) * (number == 0)
    stage.tags = tags


# --- scores


def unit(vectors_ND: np.ndarray) -> np.ndarray:
    """Return vectors of length 1."""
    return vectors_ND / np.maximum(np.linalg.norm(vectors_ND, axis=-1, keepdims=True), 1e-12)


def pair_examples(stage: Stage, vectors: Vectors) -> dict[str, Examples]:
    """Return cosines and ratings of each set of pairs."""
    found = {}
    for file, ratings in stage.ratings.items():
        cosine_N = (unit(vectors[f"{file} left"]) * unit(vectors[f"{file} right"])).sum(axis=1)
        ids = tuple(map(str, range(len(ratings))))
        found[file] = Examples("spearman", ids, tuple(cosine_N.tolist()), tuple(ratings.tolist()))
    return found


def retrieval_examples(stage: Stage, vectors: Vectors) -> dict[str, Examples]:
    """Return each query's nDCG@10 on each collection."""
    found = {}
    for name, own in stage.collections.items():
        cosine_QN = unit(vectors[f"{name} queries"]) @ unit(vectors[f"{name} documents"]).T
        documents = list(own.documents)
        values = [
            ndcg([own.judged[query].get(documents[place], 0) for place in np.argsort(-row, kind="stable")[:10]],
                 list(own.judged[query].values()))
            for query, row in zip(own.queries, cosine_QN, strict=True)
        ]  # fmt: skip
        found[name] = Examples.of_mean(values, list(own.queries))
    return found


def ndcg(ranked: Sequence[int], judged: Sequence[int]) -> float:
    """Return nDCG@10 with linear gains, as trec_eval has it."""
    best = sum(gain / np.log2(place + 2) for place, gain in enumerate(sorted(judged, reverse=True)[:10]))
    return float(sum(gain / np.log2(place + 2) for place, gain in enumerate(ranked)) / best)


def intent_examples(stage: Stage, vectors: Vectors) -> dict[str, Examples]:
    """Return which texts a linear classifier gets right: on a dev stage each half by the other."""
    features_ND, right = unit(vectors["intents"]), np.zeros(len(stage.labels))
    asked = (0, 1) if stage.name == "dev" else (1,)
    for fold in asked:
        train, test = stage.folds != fold, stage.folds == fold
        predicted = ridge(features_ND[train], stage.labels[train], features_ND[test])
        right[test] = predicted == stage.labels[test]
    return {"banking77": Examples.of_mean(right if len(asked) == 2 else right[stage.folds == 1])}


def ridge(train_ND: np.ndarray, labels_N: np.ndarray, test_MD: np.ndarray, penalty: float = 0.1) -> np.ndarray:
    """Return the labels that regularized least squares predicts, on numbers of mean 0 and variance 1."""
    mean_D, deviation_D = train_ND.mean(axis=0), train_ND.std(axis=0) + 1e-8
    one_ND, other_MD = (train_ND - mean_D) / deviation_D, (test_MD - mean_D) / deviation_D
    wanted_NC = np.eye(labels_N.max() + 1)[labels_N]
    count, width = one_ND.shape
    if count < width:
        solved = np.linalg.solve(one_ND @ one_ND.T + penalty * width * np.eye(count), wanted_NC)
        return (other_MD @ (one_ND.T @ solved)).argmax(axis=1)
    solved = np.linalg.solve(one_ND.T @ one_ND + penalty * width * np.eye(width), one_ND.T @ wanted_NC)
    return (other_MD @ solved).argmax(axis=1)


def word_examples(stage: Stage, vectors_ND: np.ndarray) -> dict[str, Examples]:
    """Return which words a linear classifier gets right: all by part of speech, those of names by kind of name."""
    found, split = {}, stage.trained_words
    for kind, tags in stage.tags.items():
        names = {tag: number for number, tag in enumerate(sorted(set(tags)))}
        labels_N = np.array([names[tag] for tag in tags])
        predicted_M = ridge(vectors_ND[:split], labels_N[:split], vectors_ND[split:])
        right_M = predicted_M == labels_N[split:]
        # Of names: those words that are in one, or are taken to be.
        counted_M = (np.ones_like(right_M) if kind != "names"
                     else (labels_N[split:] != names["O"]) | (predicted_M != names["O"]))  # fmt: skip
        found[kind] = Examples.of_mean(right_M[counted_M])
    return found


SCORERS: dict[str, Callable[[Stage, Any], dict[str, Examples]]] = {
    "pairs": pair_examples, "retrieval": retrieval_examples, "classification": intent_examples, "tokens": word_examples,
}  # fmt: skip


def value_of(examples: Examples) -> float:
    """Return the score of examples: their mean, or the rank correlation."""
    if examples.targets is None:
        return float(np.mean(examples.values))
    from scipy.stats import spearmanr

    return float(np.nan_to_num(spearmanr(examples.values, examples.targets)[0]))
