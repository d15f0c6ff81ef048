"""What embedding a table refuses: outputs that are there, places that cannot be written, rows that are wrong."""

import os

import numpy as np
import pytest

from gerund.data.embedding.job import EmbeddingConfig, Encoded, embedding_job
from gerund.data.tables import open_table
from gerund.errors import ConfigError, DataError, InputError, ModelError, OutputExistsError, ResourceError, TextError
from tests.data.embedding.crashes import ABOUT, fake_encode
from tests.data.embedding.jobs import Encoder, embed, working


class TestRefusals:
    def test_an_output_that_is_there(self, source, output):
        embed(source, output)
        before = output.read_bytes()
        with pytest.raises(OutputExistsError, match="give --force to replace it"):
            embed(source, output)
        assert output.read_bytes() == before
        assert not working(output).exists()
        embed(source, output, force=True)
        assert output.read_bytes() == before

    def test_one_that_comes_up_meanwhile(self, source, output):
        with embedding_job(open_table(source), output, EmbeddingConfig()) as job:
            output.write_bytes(b"someone else's")
            with pytest.raises(OutputExistsError):
                job.run(fake_encode, ABOUT, show_progress=False)
        assert output.read_bytes() == b"someone else's"
        output.unlink()
        assert embed(source, output, shard_rows=4096).resumed_rows == 10

    def test_the_input_itself(self, source, tmp_path):
        link = tmp_path / "link.parquet"
        link.symlink_to(source)
        with pytest.raises(InputError, match="is the input itself"):
            embed(source, link, force=True)

    @pytest.mark.parametrize("there", [True, False])
    def test_a_symbolic_link(self, source, output, tmp_path, there):
        output.parent.mkdir()
        real = tmp_path / f"real{output.suffix}"
        if there:
            real.write_text("precious")
        output.symlink_to(real)
        with pytest.raises(InputError, match=r"is a symbolic link to .*; name the file itself as the output"):
            embed(source, output, force=True)
        assert output.is_symlink()
        assert real.exists() is there
        assert not there or real.read_text() == "precious"
        output.unlink()
        (tmp_path / "elsewhere").mkdir()
        working(output).symlink_to(tmp_path / "elsewhere")
        with pytest.raises(InputError, match=r"\.parts is a symbolic link"):
            embed(source, output)
        assert not list((tmp_path / "elsewhere").iterdir())

    def test_a_folder(self, source, output):
        output.mkdir(parents=True)
        with pytest.raises(InputError, match="is a folder"):
            embed(source, output, force=True)

    def test_another_ending(self, source, tmp_path):
        with pytest.raises(ConfigError, match=r"must end in .parquet or .npy"):
            embed(source, tmp_path / "out.csv")

    def test_a_place_that_cannot_be_written(self, source, tmp_path):
        with pytest.raises(ResourceError, match="cannot write"):
            embed(source, source / "out.npy")

    def test_two_processes_at_once(self, source, output):
        with (
            embedding_job(open_table(source), output, EmbeddingConfig()),
            pytest.raises(InputError, match=rf"process {os.getpid()} is writing .* already"),
        ):
            embed(source, output)
        embed(source, output)

    def test_no_rows(self, output, tmp_path):
        source = tmp_path / "in.txt"
        source.write_text("")
        with pytest.raises(DataError, match=r"in.txt has no rows$"):
            embed(source, output)
        source.write_text("\n\n")
        with pytest.raises(DataError, match="has no rows with a text"):
            embed(source, output, empty="skip")

    def test_a_malformed_row_shows_before_anything_is_encoded(self, source, output):
        source.write_bytes(source.read_bytes() + b"\xff\n")
        encoder = Encoder()
        with pytest.raises(DataError, match="line 11: not valid UTF-8"):
            embed(source, output, encoder)
        assert encoder.shards == []

    def test_an_error_about_a_text_names_its_line(self, source, output):
        with pytest.raises(TextError, match=r"in.txt, line 5: the text has 99 tokens"):
            embed(source, output, Encoder(fail_at=1, error=TextError.about("text", 1, "has 99 tokens")))
        assert embed(source, output).resumed_rows == 3

    def test_vectors_that_are_not_finite(self, source, output):
        def broken(texts, kept):
            vectors = fake_encode(texts).vectors
            vectors[1, 2] = np.nan
            return Encoded(vectors)

        with pytest.raises(ModelError, match=r"in.txt, line 2: the vector has values that are not finite"):
            embed(source, output, broken)

    @pytest.mark.parametrize(
        "settings, message",
        [
            (dict(empty="drop"), "valid are: error, zeros, skip"),
            (dict(bad_rows="drop"), "valid are: error, skip"),
            (dict(shard_rows=0), "shard_rows must be at least 1, got 0"),
        ],
    )
    def test_options(self, source, output, settings, message):
        with pytest.raises(ConfigError, match=message):
            embed(source, output, **settings)
