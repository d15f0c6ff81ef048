"""Language models as systems: one encoder config each; passes shared between plans; encoding by worker processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from gerund.evaluation.systems.base import EmbeddingCache, Encoder, System, cosine_scores, key_of_text
from gerund.inference.encode.spans import WordPooling, check_words, word_vectors
from gerund.inference.encode.sweep import by_pass, encode_each, encode_readings, encode_tokens_each
from gerund.inference.encode.texts import encode_word_tokens, template_tokens, text_tokens
from gerund.inference.tokens import Tokens
from gerund.jobs.checkpoints import ShardCheckpoint
from gerund.jobs.engine import JobEngine, StatefulWork, WorkerPool
from gerund.language_model import LanguageModel
from gerund.models.kinds import is_encoder_decoder
from gerund.models.saved_settings import read_saved
from gerund.scoring.registry import find_scorer
from gerund.settings.encoder import EncoderConfig
from gerund.settings.plan import AttentionPlan
from gerund.settings.templates import NO_TRANSFORM
from gerund.types import Scorer
from gerund.worker_model import WorkerModel


def language_model_system(label: str, lm: LanguageModel, cache: EmbeddingCache | None = None) -> "LanguageModelSystem":
    """Return a language model as a system that can do what the model can."""
    kind = LanguageModelSystem if is_encoder_decoder(lm.model) else CausalModelSystem
    return kind(label, lm, cache)


class LanguageModelSystem(Encoder):
    """A language model under one encoder config: it encodes, ranks and generates.

    Attributes:
        lm: the model.
        words: precomputed vectors of words, by (prompt, pooling, shift) and sentence.
        worker_encode: encodes texts with a prompt in worker processes; None encodes in this process.
    """

    def __init__(self, label: str, lm: LanguageModel, cache: EmbeddingCache | None = None) -> None:
        super().__init__(label, cache)
        self.lm = lm
        self.worker_encode: Callable[[Sequence[str], str | None, ShardCheckpoint | None], np.ndarray] | None = None
        self.words: dict[tuple[str | None, str, bool], dict[tuple[str, ...], np.ndarray]] = {}

    @property
    def name(self) -> str:
        """What it was loaded from."""
        return self.lm.name

    @property
    def fingerprint(self) -> str:
        """Hash of the weights and the encoder config."""
        return self.lm.fingerprint()

    @property
    def cache_key(self) -> str:
        """The encoder and its compute type."""
        return f"{self.fingerprint}-{_name(self.lm.compute_dtype)}"

    @property
    def stored_prompts(self) -> Mapping[str, str]:
        """The encoder's own prompts by name."""
        return self.lm.encoder.prompts

    @property
    def weights_key(self) -> str:
        """The weights and the type that holds them."""
        return f"{self.lm.weights_hash}-{_name(self.lm.model.dtype)}"

    @property
    def infill_adapter(self) -> str:
        """Hash of the infill adapter; empty without one."""
        return self.lm.adapters.hash("infill")

    @property
    def scorer(self) -> Any:
        """The scorer of continuations that was trained with this encoder config."""
        return self.lm.scorer

    @property
    def fusion_weight(self) -> float:
        """The weight of its vectors in hybrid search."""
        return self.lm.fusion_weight

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector."""
        return self.lm.dimensions

    @property
    def max_length(self) -> int | None:
        """Longest text in tokens; None where there is no limit."""
        return self.lm.max_length

    def describe(self) -> dict[str, Any]:
        """Return model, encoder config and hashes."""
        lm = self.lm
        return {
            "model": lm.name,
            "attention": lm.encoder.with_defaults(lm.n_layers).attention.to_dict(),
            "pooling": lm.encoder.pooling,
            "prompt": lm.encoder.prompt,
            **{name: getattr(lm.encoder, name) for name in lm.encoder.methods},
            "max_length": lm.max_length,
            "dimensions": lm.dimensions,
            "n_layers": lm.n_layers,
            "fingerprint": lm.fingerprint(),
            "weights": lm.weights_hash,
            "adapter": lm.adapter_hash,
            **adapter_facts(lm),
            "infill_adapter": self.infill_adapter,
            "compute_dtype": _name(lm.compute_dtype),
        }

    def compute(
        self, texts: list[str], prompt: str | None, show: bool | None, checkpoint: ShardCheckpoint | None = None
    ) -> np.ndarray:
        """Compute vectors ``(n, D)`` float32 as they were pooled; finished batches are saved in the checkpoint."""
        if self.worker_encode is not None:
            return self.worker_encode(texts, prompt, checkpoint)
        vectors: np.ndarray = self.lm.encode(
            texts, prompt=prompt, normalize=False, empty="zeros", show_progress=show, kept=checkpoint
        )
        return vectors

    def prompt_text(self, prompt: str | None) -> str:
        """Return what is put before a text."""
        return self.lm.encoder.prompt_text(prompt)

    def encode_words(
        self,
        sentences: Sequence[Sequence[str]],
        *,
        prompt: str | None = None,
        pooling: WordPooling = "mean",
        shift: bool = False,
        show: bool | None = None,
    ) -> list[np.ndarray]:
        """Return one ``(n_words, D)`` float32 array per sentence; see ``LanguageModel.encode_words``."""
        known = self.words.get((prompt, pooling, shift), {})
        if known and all(tuple(words) in known for words in sentences):
            return [known[tuple(words)] for words in sentences]
        return self.lm.encode_words(sentences, prompt=prompt, pooling=pooling, shift=shift, show_progress=show)

    def encode_word_tokens(
        self, sentences: Sequence[Sequence[str]], *, prompt: str | None = None, show: bool | None = None
    ) -> list[list[np.ndarray]]:
        """Return the states of every word's tokens; see ``inference.encode.texts``."""
        return encode_word_tokens(self.lm.runtime, sentences, prompt, show=show)

    def find_scorer(self, name: str, *, seed: int) -> Scorer | None:
        """Return the scorer of a name, the model's own for the empty name; None where it has none."""
        return scorer_of(self.lm, name, seed=seed)

    def candidate_scores(
        self, queries: Sequence[str], candidates: Sequence[str], *, scorer: Scorer | None, prompt: str | None
    ) -> np.ndarray:
        """Score candidates by a scorer of continuations, without one by the cosine of the encoder's vectors."""
        if scorer is None:
            return cosine_scores(self, queries, candidates, prompt)
        texts = [f" {candidate}" for candidate in candidates]
        return np.array(scorer.score(queries, [texts for _ in queries]), dtype=np.float64)


class CausalModelSystem(LanguageModelSystem):
    """A decoder-only model, which also gives the probability of a text."""

    @property
    def causal_lm(self) -> LanguageModel:
        """The model; its unmodified causal attention gives the likelihoods."""
        return self.lm


def scorer_of(lm: LanguageModel, name: str, *, seed: int) -> Scorer | None:
    """Return the scorer of a name, the model's own for the empty name; None where it has none."""
    return find_scorer(name, lm, seed=seed) if name else lm.scorer


def adapter_facts(lm: LanguageModel) -> dict[str, Any]:
    """Return the name of the encoder's adapter, and the plan that it was trained under where that is known."""
    folder = lm.adapters.folders.get("encode")
    if folder is None:
        return {}
    plan = trained_plan(folder, lm.n_layers)
    named = {"adapter_name": adapter_name(folder)}
    return named if plan is None else {**named, "adapter_plan": plan.to_dict()}


def adapter_name(folder: Path) -> str:
    """Return the name of an adapter in tables; in a model's folder it is the model's name.

    >>> [adapter_name(Path(name)) for name in ("lora", "runs/mine/model/adapter", "runs/mine/model")]
    ['lora', 'mine', 'mine']
    """
    parts = [part for part in folder.parts if part not in ("model", "adapter")]
    return parts[-1] if parts else folder.name


def trained_plan(folder: Path, n_layers: int) -> AttentionPlan | None:
    """Return the plan in the ``gerund.json`` next to an adapter, or in the folder above; None without one."""
    for path in (folder, folder.parent):
        saved = read_saved(path)
        if saved is not None:
            return saved.applied_to(EncoderConfig()).with_defaults(n_layers).attention
    return None


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# Vectors of words that are in memory at once: 1 GB.
_MOST_BYTES = 1 << 30


def precompute(systems: Sequence[System], texts: Sequence[str], *, prompt: str | None, show: bool | None) -> None:
    """Fill the caches of systems that are one model, running once what they share.

    Systems that differ in layers, states or pooling read one pass; a transform is applied to the vectors of the same
    system without it; and plans share the layers below those that they convert. Systems that share nothing compute
    their own vectors later: those without a cache, with workers, or alone with their model.
    """
    texts = list(dict.fromkeys(texts))
    models = [system for system in systems if isinstance(system, LanguageModelSystem)]
    able = [system for system in models if system.cache is not None and system.worker_encode is None]
    if not texts or len(able) < 2:
        return
    bases = [(system, base) for system in able if (base := without_transform(system)) is not None]
    with_bases = {id(system) for system, _ in bases}
    needed = [system for system, base in bases if _missing(system, prompt, texts)]
    readers = [system for system in able if id(system) not in with_bases]
    readers += [base for system, base in bases if system in needed]
    unique = list({system.cache_key: system for system in readers}.values())
    alone: list[LanguageModelSystem] = []
    for group in by_pass(unique, [system.lm.runtime for system in unique]):
        if len(group) == 1 or all(map(_shares, group)):
            alone += group
        else:
            _fill_readings(group, prompt, texts, show)
    for _, plans in groupby(filter(_shares, alone), key=_shared_pass):
        siblings = list(plans)
        if len(siblings) > 1:
            _fill(siblings, prompt, texts, show)
    for system, base in bases:
        if system in needed and system.cache is not None and system.lm.transform is not None:
            plain_ND = base.encode(texts, prompt=prompt, show=show)
            vectors_ND = system.lm.transform(plain_ND)
            vectors_ND[~plain_ND.any(axis=1)] = 0  # empty texts
            system.cache.put(system.cache_key, system.prompt_text(prompt), texts, vectors_ND)


def without_transform(system: LanguageModelSystem) -> LanguageModelSystem | None:
    """Return the same system without its transform; None where it has none, or computes in another type without."""
    lm = system.lm
    if lm.transform is None or lm.encoder.transform == NO_TRANSFORM:
        return None
    plain = lm.with_encoder(replace(lm.encoder, transform=NO_TRANSFORM))
    if plain.runtime.autocast != lm.runtime.autocast:
        return None
    return language_model_system(system.label, plain, system.cache)


def _missing(system: LanguageModelSystem, prompt: str | None, texts: Sequence[str]) -> list[str]:
    """Return the texts whose vectors a system's cache does not have."""
    assert system.cache is not None
    store = system.cache.store(system.cache_key, system.prompt_text(prompt))
    return [text for text in texts if key_of_text(text) not in store]


def _fill_readings(group: list[LanguageModelSystem], prompt: str | None, texts: list[str], show: bool | None) -> None:
    """Compute the vectors of systems that read one pass, of the texts that any of them lacks."""
    lacking = [set(_missing(system, prompt, texts)) for system in group]
    missing = [text for text in texts if any(text in lacked for lacked in lacking)]
    group = [system for system, lacked in zip(group, lacking, strict=True) if lacked]
    if not missing:
        return
    runtimes = [system.lm.runtime for system in group]
    several = template_tokens(runtimes[0], missing, prompt, empty="zeros")
    # Of each template the vectors of every system.
    passes = [encode_readings(runtimes, tokens, show=show) for tokens in several]
    for system, *vectors in zip(group, *passes, strict=True):
        if system.cache is not None:
            system.cache.put(system.cache_key, system.prompt_text(prompt), missing, np.mean(vectors, axis=0))


def word_groups(systems: Sequence[System], sentences: Sequence[Sequence[str]]) -> list[list[System]]:
    """Return the systems in groups of one model whose word vectors fit into memory together.

    A system that cannot share a pass is a group by itself.
    """
    n_words = sum(map(len, sentences))
    models = [system for system in systems if isinstance(system, LanguageModelSystem)]
    groups: list[list[System]] = [[system] for system in systems if system not in models]
    for _, group in groupby(models, key=_shared_pass):
        siblings = list(group)
        able = [system for system in siblings if _shares(system)]
        groups += [[system] for system in siblings if system not in able]
        room = max(1, _MOST_BYTES // max(1, 4 * n_words * siblings[0].lm.dimensions))
        groups += [[*able[start : start + room]] for start in range(0, len(able), room)]
    return groups


@contextmanager
def precomputed_words(
    group: Sequence[System],
    sentences: Sequence[Sequence[str]],
    *,
    prompt: str | None,
    pooling: WordPooling = "mean",
    shift: bool,
    show: bool | None,
) -> Iterator[None]:
    """Compute the word vectors of a group of ``word_groups`` for the block; a group of one computes its own."""
    models = [system for system in group if isinstance(system, LanguageModelSystem)]
    if len(models) > 1:
        unique = list(dict.fromkeys(map(tuple, check_words(sentences))))
        tokens = text_tokens(models[0].lm.runtime, [" ".join(words) for words in unique], prompt, offsets=True)
        for system in models:
            system.words[prompt, pooling, shift] = {}

        def save(model: int, row: int, states_TD: np.ndarray) -> None:
            read = tokens[row]
            if read is not None:
                vectors = word_vectors(unique[row], read, states_TD, pooling=pooling, shift=shift)
                models[model].words[prompt, pooling, shift][unique[row]] = vectors

        encode_tokens_each([system.lm.runtime for system in models], tokens, save, show=show)
    try:
        yield
    finally:
        for system in models:
            system.words.clear()


def _fill(siblings: list[LanguageModelSystem], prompt: str | None, texts: list[str], show: bool | None) -> None:
    prompt_text = siblings[0].lm.encoder.prompt_text(prompt)
    caches = [system.cache for system in siblings if system.cache is not None]
    stores = [cache.store(system.cache_key, prompt_text) for system, cache in zip(siblings, caches, strict=True)]
    keys = {text: key_of_text(text) for text in texts}
    missing = [text for text, key in keys.items() if any(key not in store for store in stores)]
    new = [keys[text] for text in missing]
    rows = [row for row, store in enumerate(stores) if any(key not in store for key in new)]
    if len(rows) < 2:
        return
    tokens: list[Tokens | None] = text_tokens(siblings[0].lm.runtime, missing, prompt, empty="zeros")
    name = " ".join([*(siblings[row].cache_key for row in rows), prompt_text])
    with caches[rows[0]].shard(name, new) as checkpoint:
        runtimes = [siblings[row].lm.runtime for row in rows]
        for row, vectors in zip(rows, encode_each(runtimes, tokens, show=show, resume_from=checkpoint), strict=True):
            caches[row].put(siblings[row].cache_key, prompt_text, missing, vectors)


def _shares(system: LanguageModelSystem) -> bool:
    lm = system.lm
    others = lm.encoder.templates or lm.encoder.reads_beside or lm.transform is not None
    return not (lm.runtime.plan.repeats_text or others)


def _shared_pass(system: LanguageModelSystem) -> tuple[int, str, bool, int | None]:
    """Return what systems of one pass have in common: the model and the tokens."""
    lm = system.lm
    return id(lm.model), lm.encoder.prompt, lm.encoder.append_eos, lm.max_length


# Texts per worker and shard; batches are made of texts of one shard.
_SHARD = 512
# The pass number under which workers save shards; higher than that of any encoder's own passes.
_WORKER_PASS = 1_000_000
# The number of a shard's first text, its texts, and their prompt.
TextShard = tuple[int, tuple[str, ...], str | None]


@contextmanager
def encoded_by(engine: JobEngine, systems: Sequence[System], *, threads: int | None = None) -> Iterator[None]:
    """Encode whole texts by an engine's workers during the block; each computes on ``threads`` cores (None: one)."""
    models = [system for system in systems if isinstance(system, LanguageModelSystem)]
    with _Pools(engine, threads) as pools:
        for system in models:
            system.worker_encode = partial(pools.encode, system.lm)
            if system.cache is not None:
                system.cache.shards = max(system.cache.shards, engine.workers)
        try:
            yield
        finally:
            for system in models:
                system.worker_encode = None


class _Pools(ExitStack):
    """Worker processes with the model of one system at a time."""

    def __init__(self, engine: JobEngine, threads: int | None) -> None:
        super().__init__()
        self.engine, self.threads = engine, threads
        self.lm: LanguageModel | None = None
        self.pool: WorkerPool[TextShard, np.ndarray] | None = None

    def encode(
        self, lm: LanguageModel, texts: Sequence[str], prompt: str | None, checkpoint: ShardCheckpoint | None = None
    ) -> np.ndarray:
        """Return vectors ``(n, D)`` float32 as they were pooled; finished shards are saved in the checkpoint."""
        if lm is not self.lm or self.pool is None:
            self.close()
            model = WorkerModel.of(lm, threads=self.threads)
            work = StatefulWork(partial(_opened, model), gpus=model.gpus, threads=model.threads)
            self.pool, self.lm = self.enter_context(self.engine.pool(work)), lm
        vectors_ND = np.zeros((len(texts), lm.dimensions), dtype=np.float32)
        # A shard's batches differ from those of all texts: what was saved without workers isn't used.
        finished = None if checkpoint is None else checkpoint.encoding_pass(_WORKER_PASS, _WORKER_PASS + 1)
        done = frozenset() if finished is None else finished.restore(vectors_ND)
        ranges = [range(start, min(start + _SHARD, len(texts))) for start in range(0, len(texts), _SHARD)]
        shards = ((rows.start, tuple(texts[rows.start : rows.stop]), prompt) for rows in ranges if not done >= {*rows})
        for (start, shard_texts, _), shard_ND in self.pool.map(shards):
            rows = range(start, start + len(shard_texts))
            vectors_ND[rows.start : rows.stop] = shard_ND
            if finished is not None:
                finished.save(rows, shard_ND)
        return vectors_ND


def _opened(model: WorkerModel) -> Callable[[TextShard], np.ndarray]:
    return partial(_encode, model.load())


def _encode(lm: LanguageModel, shard: TextShard) -> np.ndarray:
    _, texts, prompt = shard
    vectors: np.ndarray = lm.encode(list(texts), prompt=prompt, normalize=False, empty="zeros", show_progress=False)
    return vectors
