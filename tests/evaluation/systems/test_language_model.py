"""Whole texts that an engine's workers encode have the vectors that this process gives them."""

from contextlib import contextmanager

import numpy as np
import pytest

import gerund
from gerund.evaluation.systems import base as embeddings
from gerund.evaluation.systems import language_model as workers
from gerund.evaluation.systems.base import EmbeddingCache, Encoder
from gerund.evaluation.systems.language_model import encoded_by
from gerund.evaluation.systems.selection import systems_of
from gerund.jobs.engine import LocalEngine
from gerund.settings.model_spec import EncoderSpec
from tests.jobs.pickled import PickledEngine

TEXTS = [*(f"{'the cat and ' * (i % 4)}text {i}" for i in range(10)), ""]


class Engine(LocalEngine):
    """This process, which counts whom it takes on."""

    pools = 0

    def pool(self, *given, **more):
        self.pools += 1
        return super().pool(*given, **more)


@pytest.fixture
def lm(tiny_folder):
    return gerund.load(tiny_folder, dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("cached", [True, False])
def test_the_same_vectors_under_each_plan(lm, cached, monkeypatch):
    monkeypatch.setattr(workers, "_SHARD", 3)
    monkeypatch.setattr(embeddings, "_SHARD", 4)
    columns = [EncoderSpec(attention="causal"), EncoderSpec(attention="bidir", pooling="last")]
    systems = systems_of([lm, "bm25", "hybrid"], columns, cache=EmbeddingCache() if cached else None)
    if not cached:
        for one in systems:
            one.cache = None
    encoders = [one for one in systems if isinstance(one, Encoder) and hasattr(one, "worker_encode")]
    assert len(encoders) == 2
    engine = Engine(1)
    with encoded_by(engine, systems):
        found = [[one.encode(TEXTS, prompt=prompt, normalize=True) for prompt in (None, "Q: ")] for one in encoders]
    assert engine.pools == 2
    for one, vectors in zip(encoders, found, strict=True):
        assert one.worker_encode is None
        for prompt, own in zip((None, "Q: "), vectors, strict=True):
            wanted = one.lm.encode(TEXTS, prompt=prompt, normalize=True, empty="zeros")
            np.testing.assert_allclose(own, wanted, atol=1e-6)


def test_in_another_process(lm, monkeypatch):
    monkeypatch.setattr(workers, "_SHARD", 3)
    [system] = systems_of([lm], [EncoderSpec(attention="bidir")])
    with encoded_by(PickledEngine(2), [system]):
        found = system.encode(TEXTS, normalize=True)
    np.testing.assert_allclose(found, system.lm.encode(TEXTS, normalize=True, empty="zeros"), atol=1e-6)


class Interrupted(LocalEngine):
    """This process, which is interrupted behind so many shards."""

    def __init__(self, shards):
        super().__init__(1)
        self.shards, self.seen = shards, 0

    @contextmanager
    def pool(self, work):
        class Pool:
            def map(_, shards):  # noqa: N805
                for found in inner.map(shards):
                    if self.seen == self.shards:
                        raise KeyboardInterrupt
                    self.seen += 1
                    yield found

        with super().pool(work) as inner:
            yield Pool()


@pytest.mark.slow
def test_an_interruption_keeps_the_shards_that_are_done(lm, monkeypatch, tmp_path):
    monkeypatch.setattr(workers, "_SHARD", 3)
    wanted = lm.encode(TEXTS, normalize=True, empty="zeros")
    for shards, left in ((2, 4), (9, 2)):
        [system] = systems_of([lm], [EncoderSpec()], cache=EmbeddingCache(tmp_path))
        engine = Interrupted(shards)
        with encoded_by(engine, [system]):
            if shards < left:
                with pytest.raises(KeyboardInterrupt):
                    system.encode(TEXTS, normalize=True)
            else:
                np.testing.assert_allclose(system.encode(TEXTS, normalize=True), wanted, atol=1e-6)
                assert engine.seen == left
