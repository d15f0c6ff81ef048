"""Distillation from end to end: the student nears its teacher, its head is kept, vectors are made once."""

from unittest.mock import patch

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError, ModelError
from gerund.training.corpus import teachers
from gerund.training.corpus.teachers import SHARD_TEXTS, open_teacher, read_known, teacher_vectors
from gerund.training.estimate import estimate
from gerund.training.objectives import distill
from gerund.training.recipe import Recipe, load_recipe
from gerund.training.run import train
from gerund.training.trainable_model import prepare_model
from tests.cli.helpers import run_cli
from tests.tiny import save_tiny
from tests.training.conftest import adapter_settings, plain_settings, sentences
from tests.training.outcomes import losses_of


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A model of another width than the student's."""
    return save_tiny(tmp_path_factory.mktemp("teacher") / "model", "llama")


def distilling(corpus, tmp_path_factory, base, teacher):
    recipe = adapter_settings(plain_settings(corpus, tmp_path_factory), base)
    recipe["objectives"] = [{"kind": "distill", "teacher": str(teacher), "length": 32, "batch_size": 8}]
    recipe["encoder"] = {"attention": "bidir", "pooling": "mean"}
    return {**recipe, "steps": 12, "save_steps": 12, "eval_steps": 12}


@pytest.fixture
def settings(corpus, tmp_path_factory, base, teacher):
    return distilling(corpus, tmp_path_factory, base, teacher)


@pytest.fixture(scope="module")
def student(corpus, tmp_path_factory, base, teacher):
    """Folder of a student whose head is a linear map, trained long enough to be near its teacher."""
    recipe = distilling(corpus, tmp_path_factory, base, teacher)
    recipe |= {"steps": 40, "schedule": {"name": "constant"}}
    return train(Recipe.model_validate(recipe))


@pytest.fixture(scope="module")
def token_student(corpus, tmp_path_factory, base, teacher):
    """Folder of a student whose head has a vector for every token, as it is before it learns."""
    recipe = distilling(corpus, tmp_path_factory, base, teacher)
    recipe["objectives"][0]["token_vectors"] = True
    return train(Recipe.model_validate({**recipe, "steps": 2, "optimizer": {"learning_rate": 1e-6}}))


def agreement(folder, teacher):
    """The mean cosine between a student's vectors and its teacher's, of texts that were not learned."""
    texts = [sentences(f"new{number}", 1) for number in range(40)]
    return float((gerund.load(folder).encode(texts) * gerund.load(teacher).encode(texts)).sum(1).mean())


@pytest.mark.slow
def test_the_student_nears_its_teacher_and_its_head_is_kept(student, teacher, tmp_path):
    lm, other = gerund.load(student), gerund.load(teacher)
    assert lm.dimensions == other.dimensions != lm.runtime.state_width
    losses = losses_of(student, "distill")
    assert losses[-1] < 0.7 * losses[0]
    assert agreement(student, teacher) > 0.5
    # It lies in the teacher's space, which it declares, and is no less an encoder of its own.
    assert lm.space == other.fingerprint()
    assert lm.space != lm.fingerprint()
    lm.save(tmp_path / "again")
    assert gerund.load(tmp_path / "again").space == lm.space
    # Another adapter leaves the head behind.
    assert gerund.load(student, adapter="none").head is None
    assert gerund.load(student, adapter=student / "adapter").head is None
    # A model with an adapter and a head is a teacher itself.
    assert (student / "modules.json").is_file()
    again = open_teacher(str(student))
    assert again.space == lm.space  # its own teacher's
    np.testing.assert_array_equal(again.encode(["a text"]), lm.encode(["a text"]))


@pytest.mark.slow
def test_a_head_that_learns_something_else_leaves_the_space(student, settings, write_recipe):
    settings["model"] = {"base": str(student)}
    settings["objectives"] = [{"kind": "gur", "pairs": {"files": ["pairs.parquet"]}, "length": 32}]
    head = prepare_model(load_recipe(write_recipe(settings)), write=False).head
    assert head is not None
    assert head.settings.space is None


@pytest.mark.slow
def test_vectors_of_tokens_are_near_before_the_first_step(token_student, teacher):
    lm = gerund.load(token_student)
    assert lm.head.settings.vocabulary == lm.model.get_input_embeddings().num_embeddings
    assert agreement(token_student, teacher) > 0.8
    # Batches, padding and order are nothing to them; a span's are those of its own tokens.
    texts = ["the cat", "a small dog runs under the river stone", "red"]
    together, alone = lm.encode(texts), np.stack([lm.encode(text) for text in texts])
    np.testing.assert_allclose(together, alone, atol=1e-5)
    assert lm.encode_spans(["the cat runs"], [[(0, 7)]])[0].shape == (1, lm.dimensions)


@pytest.mark.slow
def test_a_fitted_head_is_near_before_the_first_step(run, teacher):
    steps = ["steps=1", "optimizer.learning_rate=1e-6", "optimizer.head_learning_rate=1e-6"]
    at_random, fitted = run("random", *steps), run("fitted", "objectives.distill.fit_head=64", *steps)
    assert agreement(fitted, teacher) > agreement(at_random, teacher) + 0.3


@pytest.mark.slow
def test_a_run_that_goes_on_reads_nothing_again(run, settings, monkeypatch, teacher):
    settings["steps"] = 1
    run("out")
    settings["seed"] = 1

    def refuse(*_):
        raise AssertionError("the teacher reads what it has read")

    monkeypatch.setattr(teachers.GerundTeacher, "encode", refuse)
    run("another")
    settings["objectives"][0]["length"] = 24
    with pytest.raises(AssertionError, match="has read"):
        run("other-texts")


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "words"), [(False, 0), pytest.param(True, 30, marks=pytest.mark.full), (False, 30)])
def test_a_resumed_run_ends_with_the_same_weights(run, settings, tmp_path, tokens, words):
    settings["schedule"] = {"name": "constant"}
    settings["steps"], settings["save_steps"] = 4, 2
    settings["objectives"][0] |= {
        "fit_head": 0 if words else 64,
        "layers": [1],
        "token_vectors": tokens,
        "word_vectors": words,
        "word_bytes": 8 if words and not tokens else None,
    }
    whole = run("whole")
    fit_name = "fit_head" if words else "fit_projection"
    with patch.object(distill, fit_name, wraps=getattr(distill, fit_name)) as fit:
        run("cut", "steps=2")
        (tmp_path / "cut" / "model").rename(tmp_path / "cut-model")
        fitted = fit.call_count
        resumed = run("cut", resume=True)
    # Fitting may take minutes; a resumed run has its result.
    assert fit.call_count == fitted == 1
    for name in ("head.safetensors", "adapter/adapter_model.safetensors"):
        assert (whole / name).read_bytes() == (resumed / name).read_bytes()


@pytest.mark.slow
def test_further_layers_and_nested_sizes_are_learned_too(run, settings):
    plain = losses_of(run("plain", "steps=2"), "distill")[0]
    settings["objectives"][0] |= {"layers": [1, 2], "matryoshka": [4, 8]}
    folder = run("more")
    losses = losses_of(folder, "distill")
    assert losses[0] > plain + 0.1
    assert losses[-1] < losses[0]
    assert not [name for name in gerund.load(folder).head.state_dict() if "further" in name]


@pytest.mark.slow
def test_words_of_another_model_are_taken(run, settings, teacher):
    few = run("few", "steps=1", "objectives.distill.token_vectors=true", "objectives.distill.word_vectors=30")
    other = str(few)
    settings["objectives"][0] |= {"word_vectors": 30, "word_bytes": 8, "words_of": other, "fit_head": 64}
    steps = ["steps=1", "optimizer.learning_rate=1e-9", "optimizer.head_learning_rate=1e-9"]
    fitted = run("fitted", *steps)
    head, source = gerund.load(fitted).head, gerund.load(other).head
    assert head.tokens is None
    known = set(source.words.keys_W[source.words.scales_W > 0].tolist())
    taken = head.words.keys_W[head.words.scales_W > 0].tolist()
    assert len(taken) > 10
    assert set(taken) <= known
    # The linear map is fitted to what the words miss.
    model = settings["model"]
    not_fitted = run("not-fitted", "objectives.distill.fit_head=0", *steps)
    assert agreement(fitted, teacher) > agreement(not_fitted, teacher) + 0.1
    settings["model"] = {"base": str(fitted)}
    with pytest.raises(ConfigError, match="is for a new head, and the base has one"):
        run("again")
    settings["model"] = model
    settings["objectives"][0]["words_of"] = "default"
    with pytest.raises(ConfigError, match="no head with vectors of words in the space of this teacher"):
        run("refused")


def embedded(teacher, file, count, *options):
    """Write a teacher's vectors of some texts into a file."""
    texts = file.with_suffix(".txt")
    texts.write_text("\n".join(sentences(f"t{i}", 1) for i in range(count)), "utf-8")
    ran = run_cli("embed", texts, "-m", teacher, *options, "-o", file)
    assert ran.code == 0, ran.err
    return file


@pytest.mark.slow
def test_a_file_of_vectors_is_a_teacher(run, settings, teacher, tmp_path):
    vectors = embedded(teacher, tmp_path / "vectors.parquet", 64, "--keep-text")
    settings["objectives"][0] |= {"teacher": str(vectors), "token_vectors": True}
    settings["data"] = {"folder": str(tmp_path)}
    folder = run("out", "steps=4")
    assert gerund.load(folder).space == gerund.load(teacher).fingerprint()
    assert agreement(folder, teacher) > 0.5
    with pytest.raises(ConfigError, match="--keep-text"):
        read_known(embedded(teacher, tmp_path / "bare.parquet", 4))


@pytest.mark.slow
def test_vectors_in_fewer_bits_are_what_they_stand_for(teacher, tmp_path):
    def known(precision):
        file = embedded(teacher, tmp_path / f"{precision}.parquet", 8, "--keep-text", "--precision", precision)
        return read_known(file).rows(range(8))

    right = known("float32")
    for precision in ("int8", "uint8"):
        np.testing.assert_allclose(known(precision), right, atol=np.ptp(right) / 255)
    with pytest.raises(ConfigError, match="has a bit for each number"):
        known("binary")


def test_a_dry_run_reads_no_text_and_writes_nothing(settings, write_recipe, tmp_path):
    settings["objectives"][0]["token_vectors"] = True
    found = estimate(load_recipe(write_recipe(settings), [f"output={tmp_path / 'dry'}"]))
    assert found.objectives["distill"] == 8 * 32
    assert not (tmp_path / "dry").exists()


MISTAKES = {
    "nothing": ({"cosine": 0, "similarity": 0}, "nothing is learned"),
    "layers without": ({"cosine": 0, "layers": [1]}, "both 0"),
    "nested without": ({"similarity": 0, "matryoshka": [4]}, "by similarity"),
    "layer 0": ({"layers": [0]}, "counted from 1"),
    "twice": ({"layers": [1, 1]}, "named once"),
    "fitted twice": ({"fit_head": 8, "token_vectors": True}, "without token_vectors"),
    "no dimension": ({"matryoshka": [0]}, "above 0"),
}


@pytest.mark.parametrize(("changes", "reason"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told(settings, write_recipe, changes, reason):
    settings["objectives"][0] |= changes
    with pytest.raises(ConfigError, match=reason):
        load_recipe(write_recipe(settings))


@pytest.mark.parametrize(
    ("exit_layer", "layer", "reason"), [(None, 9, "texts are read by 2"), (1, 2, "layers 2, and texts are read by 1")]
)
def test_a_layer_that_does_not_read(run, settings, exit_layer, layer, reason):
    settings["encoder"] |= {"exit_layer": exit_layer}
    settings["objectives"][0]["layers"] = [layer]
    with pytest.raises(ConfigError, match=reason):
        run("out")


def test_it_comes_before_what_trains_its_head(settings):
    first = {"kind": "simcse", "batch_size": 4, "length": 32}
    with pytest.raises(ValueError, match="list it first"):
        Recipe.model_validate({**settings, "objectives": [first, *settings["objectives"]]})


def test_a_teacher_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "vectors.npy").write_bytes(b"x")
    for name, message in (
        ("./nowhere", "nowhere"),
        ("/no/such/teacher", "no/such"),
        ("vectors.npy", r"it is a file; vectors of a teacher are read from a \.parquet"),
        ("nothing", "nothing cannot be loaded: there is no such folder; taken as a hub id: "),
    ):
        with pytest.raises(ModelError, match=message):
            open_teacher(name)


class Counting:
    """A teacher that says what it was asked."""

    name, space, dimensions = "counting", "s", 2

    def __init__(self):
        self.asked = []

    def encode(self, texts):
        self.asked.append(len(texts))
        return np.array([[len(text), 1.0] for text in texts], dtype=np.float32)


def test_shards_are_kept_and_go_on(tmp_path, monkeypatch):
    monkeypatch.setattr(teachers, "SHARD_TEXTS", 4)
    texts = ["a" * number for number in range(1, 11)]
    teacher = Counting()

    def read(numbers):
        return [texts[number] for number in numbers]

    found = teacher_vectors(teacher, read, 6, tmp_path)
    assert found.rows([5, 0]).tolist() == [[6.0, 1.0], [1.0, 1.0]]
    assert teacher.asked == [4, 2]
    # The whole shards of a longer list are known.
    longer = teacher_vectors(teacher, read, 10, tmp_path)
    assert teacher.asked == [4, 2, 4, 2]
    assert longer.rows([9, 2]).tolist() == [[10.0, 1.0], [3.0, 1.0]]
    teacher.space = "another"
    teacher_vectors(teacher, read, 4, tmp_path)
    assert teacher.asked[-1] == 4
    assert SHARD_TEXTS > 1000


def test_a_damaged_shard_is_made_anew(tmp_path):
    teacher, told = Counting(), []
    texts = ["a", "bb", "ccc"]
    right = teacher_vectors(teacher, lambda numbers: [texts[number] for number in numbers], 3, tmp_path).rows([0, 1, 2])
    [shard] = tmp_path.iterdir()
    shard.write_bytes(shard.read_bytes()[:-3])
    # Another process that makes the same shard has a temporary name of its own.
    shard.with_name(f".{shard.name}.part").mkdir()
    found = teacher_vectors(teacher, lambda numbers: [texts[number] for number in numbers], 3, tmp_path, told.append)
    np.testing.assert_array_equal(found.rows([0, 1, 2]), right)
    assert teacher.asked == [3, 3]
    assert f"{shard} is damaged" in told[0]


def test_vectors_that_are_not_finite_are_refused(tmp_path):
    teacher = Counting()
    teacher.encode = lambda texts: np.full((len(texts), 2), np.nan, dtype=np.float32)
    with pytest.raises(DataError, match="no finite vector for 'b"):
        teacher_vectors(teacher, lambda numbers: ["b" for _ in numbers], 3, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_teacher_of_sentence_transformers(tmp_path):
    transformers = pytest.importorskip("sentence_transformers")
    folder = save_tiny(tmp_path / "base", "llama")
    torch.manual_seed(0)
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    inner = modules.Transformer(str(folder))
    pooled = transformers.SentenceTransformer(modules=[inner, modules.Pooling(inner.get_embedding_dimension())])
    pooled.save(str(tmp_path / "teacher"))
    one, other = open_teacher(str(tmp_path / "teacher")), open_teacher(str(tmp_path / "teacher"), "query: ")
    assert one.space == open_teacher(str(tmp_path / "teacher")).space != other.space
    assert one.encode(["the cat", "x"]).shape == (2, one.dimensions)


@pytest.mark.slow
@pytest.mark.parametrize("trained", ["student", "token_student"])
def test_a_student_is_saved_and_exported_with_its_head(trained, tmp_path, request):
    lm = gerund.load(request.getfixturevalue(trained))
    texts = ["the cat", "a small dog runs under the river stone", "red"]
    right = lm.encode(texts)
    merged = lm.export(tmp_path / "merged", "merged")
    found = gerund.load(merged.folder)
    np.testing.assert_allclose(found.encode(texts), right, atol=1e-4)
    assert found.space == lm.space
    assert found.fingerprint() == merged.fingerprint
    load = pytest.importorskip("gerund.integrations.sentence_transformers").load
    exported = lm.export(tmp_path / "st", "sentence-transformers")
    assert "head" in exported.why_custom
    theirs = load(exported.folder)
    np.testing.assert_allclose(theirs.encode([*texts, ""])[:3], right, atol=1e-4)
    assert not theirs.encode([""]).any()


def test_the_teacher_of_the_command_line(write_recipe, settings, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recipe = write_recipe(settings)
    assert load_recipe(recipe, teacher="./another").objectives[0].teacher == "./another"
    found = load_recipe(recipe, ["data.folder=elsewhere"], teacher="vectors.parquet")
    # It lies where the command is given, and brings the texts.
    assert (tmp_path / found.data.folder / found.objectives[0].teacher).resolve() == tmp_path / "vectors.parquet"
    assert not found.data.sources
    # Out of a folder that is not there no relative path leads to it.
    assert not found.data.folder.exists()
    (tmp_path / "vectors.parquet").write_bytes(b"")
    assert (found.data.folder / found.objectives[0].teacher).is_file()
    (tmp_path / "vectors.parquet").unlink()
    ran = run_cli("train", recipe, "--teacher", "vectors.parquet", f"output={tmp_path / 'out'}")
    assert "vectors.parquet: no such file" in ran.mistake
    assert "learns from no teacher" in run_cli("train", "unimae-default", "--teacher", "x").mistake


def test_an_early_exit_is_trained_and_kept(run, settings, write_recipe):
    settings["encoder"] |= {"exit_layer": 1}
    adapter = prepare_model(load_recipe(write_recipe(settings)), write=False).adapter
    adapted = {name.partition("layers.")[2][0] for name, part in adapter.named_modules() if hasattr(part, "lora_A")}
    assert adapted == {"0"}
    losses = losses_of(folder := run("out"), "distill")
    assert losses[-1] < losses[0]
    lm = gerund.load(folder)
    assert lm.encoder.exit_layer == 1 < lm.n_layers
    settings["objectives"].append({"kind": "causal", "length": 32})
    whole = prepare_model(load_recipe(write_recipe(settings)), write=False).adapter
    assert {name.partition("layers.")[2][0] for name, part in whole.named_modules() if hasattr(part, "lora_A")} > {"0"}
