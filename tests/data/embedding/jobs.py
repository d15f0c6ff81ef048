"""A job that embeds ten short texts, with an encoder that fails where it is told to."""

import pytest

from gerund.data.embedding.job import EmbeddingConfig, embedding_job
from gerund.data.tables import open_table
from tests.data.embedding.crashes import ABOUT, fake_encode

TEXTS = [f"text {i}" for i in range(10)]


class Encoder:
    """Encodes by hashing, remembers what it was given, and fails where it is told to."""

    def __init__(self, fail_at=None, error=KeyboardInterrupt):
        self.shards = []
        self.fail_at = fail_at
        self.error = error

    def __call__(self, texts, kept=None):
        if len(self.shards) == self.fail_at:
            raise self.error
        self.shards.append(texts)
        return fake_encode(texts)


def embed(source, output, encode=fake_encode, about=ABOUT, computing=None, table=None, workers=None, **options):
    config = EmbeddingConfig(**{"shard_rows": 3, **options})
    with embedding_job(table or open_table(source), output, config) as job:
        return job.run(encode, about, computing=computing, workers=workers, show_progress=False)


def interrupted(source, output, after=2, **settings):
    with pytest.raises(KeyboardInterrupt):
        embed(source, output, Encoder(fail_at=after), **settings)
    assert working(output).is_dir()


def working(output):
    return output.with_name(f"{output.name}.parts")
