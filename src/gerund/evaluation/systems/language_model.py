"""Language models as systems: one encoder config each; passes shared between plans; encoding by worker processes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gerund.evaluation.systems.base import Encoder, System, cosine_scores, key_of_text
from gerund.inference.encode.spans import WordPooling, check_words, word_vectors
from gerund.inference.encode.sweep import encode_each, encode_tokens_each
from gerund.inference.encode.texts import encode_word_tokens, text_tokens
from gerund.inference.tokens import Tokens
from gerund.jobs.checkpoints import ShardCheckpoint
from gerund.jobs.engine import JobEngine, StatefulWork, WorkerPool
from gerund.models.architectures import is_encoder_decoder
from gerund.models.encoder_settings import read_saved
from gerund.scoring.registry import find_scorer
from gerund.settings.plan import AttentionPlan
from gerund.types import Scorer
from gerund.worker_model import WorkerModel

if TYPE_CHECKING:
    from gerund.evaluation.systems.base import EmbeddingCache
    from gerund.jobs.checkpoints import ShardCheckpoint
    from gerund.language_model import LanguageModel


def language_model_system(
    label: str, lm: "LanguageModel", cache: "EmbeddingCache | None" = None
) -> "LanguageModelSystem":
    """Return a language model as a system that can do what the model can."""
    kind = LanguageModelSystem if is_encoder_decoder(lm.model) else CausalModelSystem
    return kind(label, lm, cache)


class LanguageModelSystem(Encoder):
    """A language model under one encoder config: it encodes, ranks and generates.

    Attributes:
        lm: the model.
        words: vectors of words that were computed beforehand, by (prompt, pooling, shift) and sentence.
        elsewhere: what encodes texts, behind a prompt, in the place of this process.
    """

    def __init__(self, label: str, lm: "LanguageModel", cache: "EmbeddingCache | None" = None) -> None:
        super().__init__(label, cache)
        self.lm = lm
        self.elsewhere: Callable[[Sequence[str], str | None, ShardCheckpoint | None], np.ndarray] | None = None
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
        """The encoder and the type that it computes in."""
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
        """Hash of the adapter that gaps are filled with; empty without one."""
        return self.lm.adapters.hash("infill")

    @property
    def scorer(self) -> Any:
        """The scorer of continuations that the model was trained to be under this encoder config."""
        return self.lm.scorer

    @property
    def fusion_weight(self) -> float | None:
        """What its vectors count where they are joined with words; None where nobody has tuned it."""
        return self.lm.encoder.fusion

    @property
    def dimensions(self) -> int:
        """Numbers in a vector."""
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
            "attention": lm.encoder.attention.with_defaults(lm.n_layers).to_dict(),
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
        self, texts: list[str], prompt: str | None, show: bool | None, kept: "ShardCheckpoint | None" = None
    ) -> np.ndarray:
        """Compute vectors ``(n, D)`` float32 as they were pooled, keeping finished batches where it is said."""
        if self.elsewhere is not None:
            return self.elsewhere(texts, prompt, kept)
        vectors: np.ndarray = self.lm.encode(
            texts, prompt=prompt, normalize=False, empty="zeros", show_progress=show, kept=kept
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
        """Return one ``(n_words, D)`` float32 array a sentence; see ``LanguageModel.encode_words``."""
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
        texts = [f" {one}" for one in candidates]
        return np.array(scorer.score(queries, [texts for _ in queries]), dtype=np.float64)


class CausalModelSystem(LanguageModelSystem):
    """A decoder-only model, which also tells how probable a text is."""

    @property
    def causal_lm(self) -> "LanguageModel":
        """The model, whose untouched causal weights give the likelihoods."""
        return self.lm


def scorer_of(lm: "LanguageModel", name: str, *, seed: int) -> Scorer | None:
    """Return the scorer of a name, the model's own for the empty name; None where it has none."""
    return find_scorer(name, lm, seed=seed) if name else lm.scorer


def adapter_facts(lm: "LanguageModel") -> dict[str, Any]:
    """Return what the encoder's adapter is called, and the plan that it was trained under where that is known."""
    folder = lm.adapters.folders.get("encode")
    if folder is None:
        return {}
    plan = trained_plan(folder, lm.n_layers)
    named = {"adapter_name": adapter_name(folder)}
    return named if plan is None else {**named, "adapter_plan": plan.to_dict()}


def adapter_name(folder: Path) -> str:
    """Return what tables call an adapter: what lies in a model's folder is called as the model is.

    >>> [adapter_name(Path(name)) for name in ("lora", "runs/mine/model/adapter", "runs/mine/model")]
    ['lora', 'mine', 'mine']
    """
    parts = [part for part in folder.parts if part not in ("model", "adapter")]
    return parts[-1] if parts else folder.name


def trained_plan(folder: Path, n_layers: int) -> AttentionPlan | None:
    """Return the plan that the ``gerund.json`` beside an adapter, or in the folder above it, says; None without one."""
    for place in (folder, folder.parent):
        saved = read_saved(place)
        if saved is not None:
            return saved.plan(AttentionPlan()).with_defaults(n_layers)
    return None


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


# Vectors of words that are held at once: 1 GB.
_MOST_BYTES = 1 << 30


def precompute(systems: Sequence[System], texts: Sequence[str], *, prompt: str | None, show: bool | None) -> None:
    """Fill the caches of systems that are the same model under several plans with the vectors of texts.

    Layers that two plans share run once. Systems without a cache, alone with their model, whose plan
    gives the text twice, that read in templates or off several layers, or for which others encode, are left to
    themselves.
    """
    texts = list(dict.fromkeys(texts))
    if not texts:
        return
    models = [one for one in systems if isinstance(one, LanguageModelSystem)]
    able = [one for one in models if one.cache is not None and one.elsewhere is None and _shares(one)]
    for _, group in groupby(able, key=_kinship):
        kin = list(group)
        if len(kin) > 1:
            _fill(kin, prompt, texts, show)


def word_groups(systems: Sequence[System], sentences: Sequence[Sequence[str]]) -> list[list[System]]:
    """Return the systems in groups whose word vectors fit the memory together.

    Those of one model stand together; who cannot share a pass is a group of its own.
    """
    n_words = sum(map(len, sentences))
    groups: list[list[System]] = [[one] for one in systems if not isinstance(one, LanguageModelSystem)]
    models = [one for one in systems if isinstance(one, LanguageModelSystem)]
    for _, same in groupby(models, key=_kinship):
        kin = list(same)
        able = [one for one in kin if _shares(one)]
        groups += [[one] for one in kin if not _shares(one)]
        room = max(1, _MOST_BYTES // max(1, 4 * n_words * kin[0].lm.dimensions))
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
    """Hold the word vectors of a group of ``word_groups`` while the block runs; a group of one computes its own."""
    models = [one for one in group if isinstance(one, LanguageModelSystem)]
    if len(models) > 1:
        unique = list(dict.fromkeys(map(tuple, check_words(sentences))))
        lm = models[0].lm
        tokens = text_tokens(lm.runtime, [" ".join(words) for words in unique], prompt, offsets=True)
        for one in models:
            one.words[prompt, pooling, shift] = {}

        def keep(place: int, row: int, states_TD: np.ndarray) -> None:
            read = tokens[row]
            if read is not None:
                vectors = word_vectors(unique[row], read, states_TD, pooling=pooling, shift=shift)
                models[place].words[prompt, pooling, shift][unique[row]] = vectors

        encode_tokens_each([one.lm.runtime for one in models], tokens, keep, show=show)
    try:
        yield
    finally:
        for one in models:
            one.words.clear()


def _fill(kin: list[LanguageModelSystem], prompt: str | None, texts: list[str], show: bool | None) -> None:
    text_of_prompt = kin[0].lm.encoder.prompt_text(prompt)
    stores = [one.cache.store(one.cache_key, text_of_prompt) for one in kin if one.cache is not None]
    keys = {text: key_of_text(text) for text in texts}
    missing = [text for text, key in keys.items() if any(key not in store for store in stores)]
    new = [keys[text] for text in missing]
    needy = [one for one, store in zip(kin, stores, strict=True) if any(key not in store for key in new)]
    if len(needy) < 2:
        return
    tokens: list[Tokens | None] = text_tokens(kin[0].lm.runtime, missing, prompt, empty="zeros")
    cache = needy[0].cache
    assert cache is not None
    everything = " ".join([*(one.cache_key for one in needy), text_of_prompt])
    with cache.shard(everything, new) as kept:
        vectors = encode_each([one.lm.runtime for one in needy], tokens, show=show, kept=kept)
        for one, own in zip(needy, vectors, strict=True):
            if one.cache is not None:
                one.cache.put(one.cache_key, text_of_prompt, missing, own)


def _shares(system: LanguageModelSystem) -> bool:
    lm = system.lm
    others = lm.encoder.templates or lm.encoder.reads_beside or lm.transform is not None
    return not (lm.runtime.plan.repeats_text or others)


def _kinship(system: LanguageModelSystem) -> tuple[int, str, bool, int | None]:
    """What systems of one sweep have in common: the model and the tokens."""
    lm = system.lm
    return id(lm.model), lm.encoder.prompt, lm.encoder.append_eos, lm.max_length


# Texts that a worker encodes at a time; batches are made of texts of one shard.
_SHARD = 512
# The number of the pass under which they keep shards; no encoder has so many of its own.
_OF_WORKERS = 1_000_000
# A shard: its number, its texts and what is put before them.
TextShard = tuple[int, tuple[str, ...], str | None]


@contextmanager
def encoded_by(engine: JobEngine, systems: Sequence[System], *, threads: int | None = None) -> Iterator[None]:
    """Let the workers of an engine encode whole texts for the language models among systems until the block ends."""
    models = [one for one in systems if isinstance(one, LanguageModelSystem)]
    with _Pools(engine, threads) as pools:
        for one in models:
            one.elsewhere = partial(pools.encode, one.lm)
            if one.cache is not None:
                one.cache.shards = max(one.cache.shards, engine.workers)
        try:
            yield
        finally:
            for one in models:
                one.elsewhere = None


class _Pools(ExitStack):
    """The workers of one system, until another one asks."""

    def __init__(self, engine: JobEngine, threads: int | None) -> None:
        super().__init__()
        self.engine, self.threads = engine, threads
        self.lm: LanguageModel | None = None
        self.pool: WorkerPool[TextShard, np.ndarray] | None = None

    def encode(
        self, lm: "LanguageModel", texts: Sequence[str], prompt: str | None, kept: ShardCheckpoint | None = None
    ) -> np.ndarray:
        """Return vectors as they were pooled, ``(n, D)`` float32, keeping finished shards where it is said."""
        if lm is not self.lm or self.pool is None:
            self.close()
            model = WorkerModel.of(lm, threads=self.threads)
            work = StatefulWork(partial(_opened, model), gpus=model.gpus, threads=model.threads)
            self.pool, self.lm = self.enter_context(self.engine.pool(work)), lm
        vectors_ND = np.zeros((len(texts), lm.dimensions), dtype=np.float32)
        # Batches of a shard are others than those of all texts: what was kept without workers is not taken.
        finished = None if kept is None else kept.encoding_pass(_OF_WORKERS, _OF_WORKERS + 1)
        done = frozenset() if finished is None else finished.restore(vectors_ND)
        stretches = [range(start, min(start + _SHARD, len(texts))) for start in range(0, len(texts), _SHARD)]
        shards = ((own.start, tuple(texts[own.start : own.stop]), prompt) for own in stretches if not done >= {*own})
        for (start, own_texts, _), found_ND in self.pool.map(shards):
            rows = range(start, start + len(own_texts))
            vectors_ND[rows.start : rows.stop] = found_ND
            if finished is not None:
                finished.save(rows, found_ND)
        return vectors_ND


def _opened(model: WorkerModel) -> Callable[[TextShard], np.ndarray]:
    return partial(_encode, model.load())


def _encode(lm: "LanguageModel", shard: TextShard) -> np.ndarray:
    _, texts, prompt = shard
    vectors: np.ndarray = lm.encode(list(texts), prompt=prompt, normalize=False, empty="zeros", show_progress=False)
    return vectors
