"""Every reading without training on real models: score against cost, chosen on one sample and reported on another.

    python benchmarks/real_models.py --data ../shared/data --work runs/real --models smollm2=FOLDER gemma3=FOLDER

A reading is a plan, a template or prompt, the layers and what of them is read (hidden states, values, outputs of the
attention), a pooling and a transform. Readings that need the same pass share it: of each pass all layers and poolings
are scored at once. First every pass on the dev sample (rung `dev`); then of each family the pass with the best reading,
on the test sample (rung `test`), with bootstrap intervals. Finished passes lie in the work folder and are not run
again. `real_models_data.py` says what is sampled.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch

import gerund
import harness
from gerund.evaluation.statistics import interval_of
from gerund.evaluation.task import Examples
from gerund.inference.encode.batches import in_batches, token_states
from gerund.inference.encode.runtime import EncoderRuntime, states_each
from gerund.inference.encode.spans import word_vectors
from gerund.inference.encode.sweep import encode_readings
from gerund.inference.encode.texts import template_tokens, text_tokens
from gerund.inference.tokens import Tokens
from gerund.language_model import LanguageModel
from gerund.models.vectors import fit
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import settings_of_template
from real_models_data import DEV, GROUPS, QUICK, SCORERS, TEST, Stage, Vectors, sampled, value_of
from results import Column, Row, Table

POOLINGS = ("mean", "weighted-mean", "last", "last-mean")
TRANSFORMS = ("all-but-the-top", "all-but-the-top-1", "standardization", "whitening-128")
ONE_WORD = {
    "one word, topic": 'Text: {text}\nThe topic of this text in one word: "',
    "one word, said otherwise": 'The text "{text}" can be summed up in one word: "',
    "one word, meaning": 'The meaning of the sentence "{text}" in a single word is "',
}
INSTRUCTIONS = {
    "instruction, similar": "Represent this text so that similar texts are near: ",
    "instruction, topic": "Identify the topic of the following text: ",
    "instruction, meaning": "Here is a text whose meaning matters: ",
}
# Plans whose word vectors are scored.
OF_TOKENS = ("causal", "bidir", "inter-back", "inplace-bidir")
TITLES = {"pairs": "pairs (Spearman)", "retrieval": "retrieval (nDCG@10)", "classification": "77 intents (accuracy)"}
# The wordings over which the spread is shown.
WORDINGS = {"one word": ("PromptEOL", *ONE_WORD), "instruction": tuple(INSTRUCTIONS)}


# Fewer texts than these are no sample for a transform.
_FEWEST = 150
# Of a dev stage, every so manyth text is in the sample that transforms are fitted on for the test stage.
_STEP = 4


@dataclass(frozen=True)
class Pass:
    """One pass of the model over every text; its readings differ in layers, poolings and transforms."""

    name: str
    family: str
    config: EncoderConfig
    groups: tuple[str, ...] = ("pairs", "retrieval", "classification")
    parts: bool = False  # whether values and outputs of the attention are read too

    @property
    def passes(self) -> int:
        """How often the model reads a text."""
        return max(1, len(self.config.templates))


def pass_of(n: int, name: str, family: str, attention: AttentionPlan, **more: Any) -> Pass:
    """Return a pass for a model of n layers; ``more`` are encoder settings."""
    config = EncoderConfig(attention, **{**settings_of_template(more.get("template", "none")), **more})
    plain = config.template == "none" and not config.prompt
    told = plain and (attention.name in OF_TOKENS or attention == AttentionPlan("mask0-bidir").with_defaults(n))
    once = attention.takes_skips and not attention.skips
    return Pass(name, family, config, GROUPS if told else GROUPS[:3], parts=once)


def plans_of(n: int) -> list[Pass]:
    """Return the passes that are an attention plan and nothing else, for a model of n layers."""

    def plan(name: str, fraction: float | None = None, **more: Any) -> Pass:
        made = AttentionPlan(name, k=None if fraction is None else max(1, round(fraction * n)), **more)
        family = "skips" if made.skips and name == "causal" else name
        return pass_of(n, f"causal skips={made.skips}" if family == "skips" else made.label(n), family, made)

    return [
        plan("causal"), plan("mask0-bidir", 0.45), plan("inter-back", 0.27), plan("causal", skips=1), plan("echo"),
        plan("mask0-bidir", 0.7), plan("inplace-bidir", 0.27), plan("bidir"), plan("inter-back", 0.13),
        plan("mask0-all", 0.85), plan("extra-back", 0.27), plan("inter-bidir", 0.27),
        pass_of(n, "extend-back k=1", "extend", AttentionPlan("extend-back", k=1)),
        plan("mask0+bidir", 0.6, k0=max(1, round(0.3 * n))), plan("inplace-back", 0.27), plan("mask0-for", 0.27),
        plan("mask0-bidir", 0.45, skips=4), plan("inter-back", 0.4), plan("mask0-bidir", 0.27), plan("causal", skips=2),
        plan("extra-bidir", 0.27),
    ]  # fmt: skip


def methods_of(n: int, rerouted: str) -> list[Pass]:
    """Return the passes with a template, a prompt or a changed pass, for a model of n layers."""
    causal = AttentionPlan("causal")
    late = f"{n // 2}-{n // 2 + max(1, n // 10)}"

    def of(name: str, family: str, attention: AttentionPlan = causal, **more: Any) -> Pass:
        return pass_of(n, name, family, attention, **more)

    other = "one word, other wordings"
    converted = {name: AttentionPlan(name, k=max(1, round(part * n)))
                 for name, part in (("inter-back", 0.13), ("mask0-bidir", 0.27))}  # fmt: skip
    return [
        of("PromptEOL", "PromptEOL", template="prompteol"),
        *(of(name, other, template=text, pooling="last") for name, text in ONE_WORD.items()),
        of(f"Token Prepending {n // 4}", "Token Prepending", template="prompteol", prepend=n // 4),
        *(of(name, "instruction", prompt=text) for name, text in INSTRUCTIONS.items()),
        of("KV-Embedding's template alone", "KV-Embedding's template alone", template="kv-embedding"),
        of(f"KV-Embedding {rerouted}", "KV-Embedding", template="kv-embedding", reroute=rerouted),
        of("PromptEOL, knowledge", "PromptEOL's kin", template="prompteol-knowledge"),
        of("PromptEOL, chain of thought", "PromptEOL's kin", template="prompteol-cot"),
        of("PromptEOL, one example", "PromptEOL's kin", template="prompteol-few-shot"),
        *(of(f"PromptEOL, {name}", "PromptEOL, converted", plan, template="prompteol")
          for name, plan in converted.items()),
        of(f"Token Prepending {n // 8}", "Token Prepending", template="prompteol", prepend=n // 8),
        of(f"KV-Embedding {late}", "KV-Embedding", template="kv-embedding", reroute=late),
        of("echo, in its template", "echo", AttentionPlan("echo"), template="rewrite"),
        replace(of("MetaEOL", "MetaEOL", template="metaeol"), groups=("pairs",)),
        replace(of("4 generated tokens", "generated tokens", generated=4), groups=("pairs",)),
        replace(of("topic, 4 generated tokens", "generated tokens", template="topic", pooling="mean", generated=4),
                groups=("pairs",)),
    ]  # fmt: skip


def passes_of(n: int, rerouted: str) -> list[Pass]:
    """Return all passes, the most telling first."""
    plans, methods = plans_of(n), methods_of(n, rerouted)
    first = [*plans[:2], methods[0], plans[2], *methods[1:4], plans[3], methods[4], plans[4], *methods[5:10]]
    return [*first, *(own for own in [*plans, *methods] if own not in first)]


def layer_sets(n: int) -> list[str]:
    """Return which layers are read, as `layers` spells them."""
    singles = sorted({n // 4, n // 2, round(0.625 * n), round(0.75 * n), round(27 / 32 * n), n - 2, n - 1, n})
    half, late = n // 2, round(0.75 * n)
    return [*map(str, singles), "all", f"{half}-{n}", f"{late}-{n}", f"1+{n}"]


@dataclass(frozen=True)
class Source:
    """What is read: of these layers, pooled so."""

    part: str  # hidden, values, attention
    layers: str
    pooling: str

    @property
    def label(self) -> str:
        """A short name."""
        part = "" if self.part == "hidden" else f"{self.part} of "
        return f"{part}layers {self.layers}, {self.pooling}"


def runtimes_of(lm: LanguageModel, own: Pass, sources: Sequence[Source]) -> list[EncoderRuntime]:
    """Return the encoders of a pass that read these sources."""
    configs = [replace(own.config, layers=each.layers, states=each.part, pooling=each.pooling) for each in sources]
    return [lm.with_encoder(config).runtime for config in configs]


def sources_of(own: Pass, n: int) -> list[Source]:
    """Return what is read in a pass."""
    sets = layer_sets(n)
    found = [Source("hidden", layers, pooling) for layers in sets for pooling in POOLINGS]
    if own.parts:
        kept = [name for name in sets if name != f"1+{n}"]
        found += [Source("values", layers, pooling) for layers in kept for pooling in ("mean", "last")]
        found += [Source("attention", layers, pooling) for layers in kept for pooling in ("mean", "last")]
    return found


def read(lm: LanguageModel, own: Pass, texts: Sequence[str]) -> tuple[dict[Source, np.ndarray], float]:
    """Return the vectors ``(n, D)`` of texts by reading, and the processor seconds of the passes."""
    start = time.process_time()
    if own.config.generated:
        states_ND = lm.with_encoder(own.config).encode(list(texts), normalize=False, empty="zeros", show_progress=False)
        return {Source("hidden", str(lm.n_layers), "mean"): states_ND}, time.process_time() - start
    sources = sources_of(own, lm.n_layers)
    runtimes = runtimes_of(lm, own, sources)
    several = template_tokens(runtimes[0], texts, empty="zeros")
    start = time.process_time()
    passes = [encode_readings(runtimes, tokens, show=False) for tokens in several]
    seconds = time.process_time() - start
    return {source: np.mean(vectors, axis=0) for source, *vectors in zip(sources, *passes, strict=True)}, seconds


def read_words(lm: LanguageModel, own: Pass, sentences: Sequence[Sequence[str]]) -> dict[Source, np.ndarray]:
    """Return the vectors of all words of all sentences by reading: the mean over a word's tokens."""
    sources = [Source("hidden", name, "mean") for name in layer_sets(lm.n_layers)]
    runtimes = runtimes_of(lm, own, sources)
    tokens = text_tokens(runtimes[0], [" ".join(words) for words in sentences], empty="zeros", offsets=True)
    found: dict[Source, list[np.ndarray]] = {
        replace(each, pooling="words"): [np.zeros(0)] * len(tokens) for each in sources
    }
    latest: list[torch.Tensor] = []

    def states(batch: Sequence[Tokens]) -> tuple[torch.Tensor, torch.Tensor]:
        latest[:], begin = states_each(runtimes, batch)
        return latest[0], begin

    def keep(rows: list[int], batch: list[Tokens], hidden_BTD: torch.Tensor, begin: torch.Tensor) -> None:
        del hidden_BTD
        for own_words, state_BTD in zip(found.values(), latest, strict=True):
            for row, text, state_TD in zip(rows, batch, token_states(batch, state_BTD, begin), strict=True):
                own_words[row] = word_vectors(sentences[row], text, state_TD)

    in_batches(runtimes[0], tokens, states, keep, show=False)
    return {source: np.concatenate(own_words) for source, own_words in found.items()}


def transformed(name: str, sample_ND: np.ndarray, vectors: Vectors) -> Vectors:
    """Return vectors under a transform that was fitted on others."""
    if name == "standardization":
        mean_D, deviation_D = sample_ND.mean(axis=0), sample_ND.std(axis=0) + 1e-8
        return {key: (own - mean_D) / deviation_D for key, own in vectors.items()}
    fitted = fit(name, sample_ND)
    return {key: fitted(own) for key, own in vectors.items()}


def group_scores(stage: Stage, group: str, vectors: Any) -> tuple[float, dict[str, Examples]]:
    """Return the mean over a group's sets in percent, and the examples."""
    examples = SCORERS[group](stage, vectors)
    return 100 * fmean(map(value_of, examples.values())), examples


def interval(examples: Mapping[str, Examples]) -> list[float]:
    """Return half the widths of the 95% intervals, combined over a group's sets, as low and high offsets."""
    bounds = [(interval_of(one), value_of(one)) for one in examples.values()]
    size = len(bounds)
    down = np.sqrt(sum((mid - found.low) ** 2 for found, mid in bounds if found)) / size
    up = np.sqrt(sum((found.high - mid) ** 2 for found, mid in bounds if found)) / size
    return [round(100 * down, 2), round(100 * up, 2)]


def measure(
    lm: LanguageModel, own: Pass, stage: Stage, fitted_on: Sequence[str], chosen: Sequence[str]
) -> dict[str, Any]:
    """Score all readings of a pass on a stage; `chosen` are those that get an interval and transforms."""
    start = time.process_time()
    lists = {key: texts for key, texts in stage.lists.items() if _group(key) in own.groups}
    flat = [text for texts in lists.values() for text in texts]
    vectors, seconds = read(lm, own, [*flat, *fitted_on])
    readings: dict[str, dict[str, Any]] = {}
    groups = [group for group in own.groups if group != "tokens"]

    def score(label: str, given: Vectors, *, precise: bool) -> None:
        entry: dict[str, Any] = {}
        for group in groups:
            value, examples = group_scores(stage, group, given)
            entry[group] = round(value, 2)
            if precise:
                entry[f"{group} interval"] = interval(examples)
                entry[f"{group} sets"] = {key: round(100 * value_of(one), 2) for key, one in examples.items()}
        readings[label] = entry

    parts = {source: _parts(lists, own_ND) for source, own_ND in vectors.items()}
    for source, given in parts.items():
        score(source.label, given, precise=source.label in chosen)
    for source in _bases(readings, list(parts), own, chosen, lm.n_layers):
        sample_ND = vectors[source][len(flat) :] if fitted_on else vectors[source]
        for name in TRANSFORMS:
            label = f"{source.label}, {name}"
            if (not chosen or label in chosen) and len(np.unique(sample_ND, axis=0)) > _FEWEST:
                score(label, transformed(name, sample_ND, parts[source]), precise=label in chosen)
    if "tokens" in own.groups:
        for source, word_ND in read_words(lm, own, stage.words).items():
            value, examples = group_scores(stage, "tokens", word_ND)
            entry = {"tokens": round(value, 2), "tokens interval": interval(examples) if chosen else None,
                     "tokens sets": {key: round(100 * value_of(one), 2) for key, one in examples.items()}}  # fmt: skip
            readings[source.label] = {key: found for key, found in entry.items() if found is not None}
    return {
        "pass": own.name, "family": own.family, "stage": stage.name, "config": own.config.to_dict(),
        "passes": own.passes, "texts": len(flat) + len(fitted_on), "cpu_seconds": round(seconds, 2),
        "all_cpu_seconds": round(time.process_time() - start, 2), "readings": readings,
    }  # fmt: skip


def _group(key: str) -> str:
    if key == "intents":
        return "classification"
    return "retrieval" if key.endswith(("documents", "queries")) else "pairs"


def _parts(lists: Mapping[str, Sequence[str]], vectors_ND: np.ndarray) -> dict[str, np.ndarray]:
    found, start = {}, 0
    for key, texts in lists.items():
        found[key] = vectors_ND[start : start + len(texts)]
        start += len(texts)
    return found


def usual_of(own: Pass, n: int) -> str:
    """Return the label of a pass as gerund reads it unless told otherwise."""
    pooling = own.config.pooling if own.config.pooling in POOLINGS else "mean"
    layers = str(n) if own.config.layers == "last" else str(n + 1 + int(own.config.layers))
    return Source("hidden", layers, pooling).label


def _bases(
    readings: Mapping[str, Mapping[str, float]], sources: list[Source], own: Pass, chosen: Sequence[str], n: int
) -> list[Source]:
    """Return the readings that transforms are fitted to: the usual one, and the best of each group."""
    if chosen:
        return [source for source in sources if any(label.startswith(f"{source.label}, ") for label in chosen)]
    labels = [usual_of(own, n), max(readings, key=lambda label: mean_of_groups(readings[label]))]
    return [source for source in sources if source.label in labels]


def best_readings(found: Mapping[str, Any], own: Pass, n: int) -> list[str]:
    """Return which readings of a pass a dev stage chose: the usual, the best of each group and in the mean."""
    readings: dict[str, dict[str, float]] = found["readings"]
    labels = [usual_of(own, n)]
    whole = [label for label in readings if own.groups[0] in readings[label]]
    starts = ("", "values", "attention", "layers")
    for start in starts:
        able = [label for label in whole if label.startswith(start) and (start != "layers" or label.count(",") == 1)]
        for group in own.groups[:3] if able else ():
            labels.append(max(able, key=lambda label, group=group: readings[label][group]))  # type: ignore[misc]
        labels += [max(able, key=lambda label: mean_of_groups(readings[label]))] if able else []
    return list(dict.fromkeys(labels))


def mean_of_groups(entry: Mapping[str, Any]) -> float:
    """Return the mean over pairs, retrieval and classification; of a reading without one of them -1."""
    values = [entry.get(group) for group in GROUPS[:3]]
    return -1.0 if None in values else fmean(values)  # type: ignore[type-var]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9+]+", "-", text.lower()).strip("-")


def run_model(lm: LanguageModel, name: str, options: argparse.Namespace) -> None:
    """Run what is not finished: all passes on dev, then of each family the best on test."""
    folder = options.work / name
    sizes = (QUICK, QUICK) if options.quick else (DEV, TEST)
    dev, test = sampled(options.data, "dev", sizes[0]), sampled(options.data, "test", sizes[1])
    flat = [text for texts in dev.lists.values() for text in texts]
    known = folder / "rerouted.txt"
    if not known.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        known.write_text(lm.rerouting_layers(flat[:30]), encoding="utf-8")
    passes = passes_of(lm.n_layers, known.read_text(encoding="utf-8"))[: 3 if options.quick else options.tried]
    if options.only:
        passes = [own for own in passes_of(lm.n_layers, known.read_text(encoding="utf-8")) if own.name in options.only]
    for own in passes:
        finish(folder / "dev" / f"{_slug(own.name)}.json", lm, own, dev, [], [])
    if options.dev_only or options.only:
        return
    for own, chosen in selected(folder, passes, lm.n_layers, options.tested):
        finish(folder / "test" / f"{_slug(own.name)}.json", lm, own, test, flat[::_STEP], chosen)
    (folder / "samples.json").write_text(
        json.dumps({"dev": dev.described(), "test": test.described()}), encoding="utf-8"
    )


def finish(path: Path, lm: LanguageModel, own: Pass, stage: Stage, fitted_on: list[str], chosen: list[str]) -> None:
    """Measure a pass and write it, unless it is there."""
    if path.is_file():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    found = measure(lm, own, stage, fitted_on, chosen)
    path.write_text(json.dumps(found, indent=1), encoding="utf-8")
    label, best = max(found["readings"].items(), key=lambda item: mean_of_groups(item[1]))
    scores = [best.get(group) for group in GROUPS[:3]]
    sys.stderr.write(f"{stage.name} {own.name}: {found['all_cpu_seconds']} s; best {label} {scores}\n")


def selected(folder: Path, passes: Sequence[Pass], n: int, most: int) -> list[tuple[Pass, list[str]]]:
    """Return of each family the pass whose best reading is best on dev, with its chosen readings."""
    families: dict[str, list[tuple[float, Pass, list[str]]]] = {}
    for own in passes:
        found = json.loads((folder / "dev" / f"{_slug(own.name)}.json").read_text(encoding="utf-8"))
        score = max(mean_of_groups(entry) for entry in found["readings"].values())
        families.setdefault(own.family, []).append((score, own, best_readings(found, own, n)))
    kept = [max(own, key=lambda item: item[0]) for own in families.values()]
    kept.sort(key=lambda item: -item[0])
    # The causal model and the usual plan are always reported.
    always = [one for own in families.values() for one in own if one[1].name in (passes[0].name, passes[1].name)]
    kept = [*always, *kept[:most]]
    unique = {own.name: (own, chosen) for _, own, chosen in kept}
    return list(unique.values())


def _loaded(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]


def _cost(found: Mapping[str, Any], causal: Mapping[str, Any]) -> float:
    """Return the processor time of a pass relative to the causal one's on the same texts."""
    return (found["cpu_seconds"] / found["texts"]) / (causal["cpu_seconds"] / causal["texts"])


def dev_table(name: str, folder: Path) -> Table:
    """Return of each pass the usual reading and the best one without a transform, on the dev sample."""
    found = _loaded(folder / "dev")
    causal = next(one for one in found if one["family"] == "causal")
    rows: list[Row] = []
    for one in found:
        readings, n = one["readings"], _depth(causal)
        plain = {label: entry for label, entry in readings.items() if not label.endswith(TRANSFORMS)}
        usual = usual_of(Pass(one["pass"], "", _config(one)), n)
        picked = {"as it comes": usual, "best layers and pooling": max(plain, key=lambda label: _mean(plain[label])),
                  "best with a transform": max(readings, key=lambda label: _mean(readings[label]))}  # fmt: skip
        if left_out := set(GROUPS[:3]) - set(readings[usual]):
            picked = {f"as it comes, without {' and '.join(sorted(left_out))}": usual}
        for what, label in picked.items():
            entry = readings[label]
            mean = _mean(entry)
            rows.append({"pass": one["pass"], "what": what, "reading": label, "passes": one["passes"],
                         "cost": round(_cost(one, causal), 2), "mean": round(mean, 1) if mean >= 0 else None,
                         **{group: entry.get(group) for group in GROUPS[:3]}})  # fmt: skip
    rows.sort(key=lambda row: -float(row["mean"] or 0))  # type: ignore[arg-type]
    columns = [Column("pass", "pass"), Column("what", "which reading of it"), Column("reading", "reading"),
               Column("passes", "passes"), Column("cost", "cost (causal = 1)", "", 2),
               Column("mean", "mean", "%", 1, "higher"),
               *(Column(group, TITLES[group], "%", 1, "higher") for group in GROUPS[:3])]  # fmt: skip
    return Table(f"dev-{name}", f"{name}: all passes on the sample to choose on.", columns, rows)


def test_table(name: str, folder: Path) -> Table:
    """Return the chosen readings on the test sample, with intervals."""
    rows: list[Row] = []
    found = _loaded(folder / "test")
    causal = next(one for one in found if one["family"] == "causal")
    for one in found:
        n = _depth(causal)
        usual = usual_of(Pass(one["pass"], "", _config(one)), n)
        for label, entry in one["readings"].items():
            if "pairs interval" not in entry:
                continue
            row: Row = {"pass": one["pass"], "what": "as it comes" if label == usual else "chosen", "reading": label,
                        "cost": round(_cost(one, causal), 2), "mean": round(_mean(entry), 1)}  # fmt: skip
            for group in GROUPS[:3]:
                low, high = entry[f"{group} interval"]
                row[group], row[f"{group}_interval"] = entry[group], f"-{low} +{high}"
            rows.append(row)
    rows.sort(key=lambda row: -float(row["mean"]))  # type: ignore[arg-type]
    columns = [Column("pass", "pass"), Column("what", "which reading of it"), Column("reading", "reading"),
               Column("cost", "cost (causal = 1)", "", 2), Column("mean", "mean", "%", 1, "higher")]  # fmt: skip
    for group in GROUPS[:3]:
        columns += [Column(group, TITLES[group], "%", 1, "higher"), Column(f"{group}_interval", "95%")]
    caption = f"{name}: readings that the dev sample chose, on the test sample; half widths of 95% bootstrap intervals."
    return Table(f"test-{name}", caption, columns, rows)


def token_table(name: str, folder: Path) -> Table:
    """Return the scores of words: of each pass the last layer's and those of the layers that are best on dev."""
    rows: list[Row] = []
    best: dict[str, list[str]] = {}
    for stage in ("dev", "test"):
        for one in _loaded(folder / stage):
            words = {label: entry for label, entry in one["readings"].items() if "tokens" in entry}
            # What is best on dev is reported on test.
            best.setdefault(one["pass"], sorted(words, key=lambda label: -words[label]["tokens"])[:1])
            last = [label for label in words if label == f"layers {_depth(one)}, words"]
            for label in dict.fromkeys([*last, *(label for label in best[one["pass"]] if label in words)]):
                rows.append({"pass": one["pass"], "stage": stage, "reading": label, "tokens": words[label]["tokens"],
                             **words[label]["tokens sets"]})  # fmt: skip
    columns = [Column("pass", "pass"), Column("stage", "sample"), Column("reading", "layers"),
               Column("tokens", "mean", "%", 1, "higher"), Column("parts of speech", "parts of speech", "%", 1),
               Column("names", "names", "%", 1)]  # fmt: skip
    return Table(f"words-{name}", f"{name}: words of CoNLL-2003 by a linear classifier.", columns, rows)


def _config(found: Mapping[str, Any]) -> EncoderConfig:
    described = found["config"]
    return EncoderConfig(**{**described, "attention": AttentionPlan.from_dict(described["attention"])})


def _depth(found: Mapping[str, Any]) -> int:
    """Return the number of layers, from the readings' names: the highest layer that is read alone."""
    return max(int(match[1]) for label in found["readings"] if (match := re.match(r"layers (\d+),", label)))


def _mean(entry: Mapping[str, Any]) -> float:
    return mean_of_groups(entry)


def tables_of(name: str, folder: Path) -> list[Table]:
    """Return what is finished of a model."""
    made = [dev_table(name, folder)]
    if list((folder / "test").glob("*.json")):
        made.append(test_table(name, folder))
    return [*made, token_table(name, folder)]


def main(argv: list[str] | None = None) -> None:
    """Measure what is missing and write the tables."""
    parser = harness.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="finished passes, used again where they are")
    parser.add_argument("--models", nargs="+", required=True, help="NAME=FOLDER, or a name that gerund knows")
    parser.add_argument("--tried", type=int, help="passes on the dev sample, the most telling first (all)")
    parser.add_argument("--tested", type=int, default=9, help="families on the test sample, best on dev (%(default)s)")
    parser.add_argument("--only", nargs="*", default=[], help="names of passes on the dev sample, and no test sample")
    parser.add_argument("--dev-only", action="store_true", help="leave the test sample out")
    parser.add_argument("--tables-only", action="store_true", help="make the tables of what is finished")
    options = harness.parse(parser, argv)
    options.argv = [word for word in options.argv if word != "--tables-only"]  # what measured them says more
    tables = list[Table]()
    for given in options.models:
        name, _, folder = given.partition("=")
        if not options.tables_only:
            lm = gerund.load(folder or name, adapter="none")
            run_model(lm.with_encoder(EncoderConfig()), name, options)
        tables += tables_of(name, options.work / name)
    sizes = {"dev": QUICK, "test": QUICK} if options.quick else {"dev": DEV, "test": TEST}
    samples = {stage: sampled(options.data, stage, size).described() for stage, size in sizes.items()}
    harness.report(options, __file__, tables, samples=samples)


if __name__ == "__main__":
    main()
