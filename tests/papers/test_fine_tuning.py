"""Fine-tuning trains a copy: it begins as the encoder, it learns, and the model stays what it was."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import gerund
from gerund.errors import ConfigError, DataError, ModelError
from gerund.evaluation.registry import select
from gerund.evaluation.systems.language_model import language_model_system
from gerund.evaluation.task import EvaluationConfig
from gerund.inference.encode.runtime import TextClassifier
from gerund.inference.encode.texts import text_tokens
from gerund.models.heads import ProjectionHead
from gerund.models.light_head import HeadConfig
from gerund.papers.fine_tuning import FineTuning, _inputs, copied, fine_tuned, predicted
from gerund.papers.fine_tuning import FineTuningConfig as How
from gerund.papers.linear_probes import FewShot
from tests.adapters import PEFT_WARNINGS, make_adapter
from tests.evaluation.tables import fruits, write_classification
from tests.tiny import save_tiny, save_tiny_t5

TEXTS = ["the cat", "an inn in the rain", "", "a tin"]
HOW = How(epochs=3, learning_rate=3e-3, batch_size=4, seed=0)


@pytest.fixture(scope="module")
def t5_folder(tmp_path_factory):
    """A T5 with a head."""
    folder = tmp_path_factory.mktemp("models") / "t5"
    plain = save_tiny_t5(tmp_path_factory.mktemp("plain"))
    gerund.load(plain, dtype="float32").save(folder)
    torch.manual_seed(3)
    ProjectionHead(HeadConfig(width=32, dimensions=8)).save(folder)
    return folder


@pytest.fixture
def task(tmp_path):
    write_classification(tmp_path, train=fruits(30)[:61], test=fruits(5, start=40))
    [found] = FineTuning.find(tmp_path)
    return replace(found, shots=10, epochs=4, learning_rate=3e-3, batch_size=8)


def loaded(kind, tiny_folder, t5_folder, tmp_path):
    if kind == "t5":
        return gerund.load(t5_folder, dtype="float32")
    if kind == "adapter":
        return gerund.load(tiny_folder, adapter=make_adapter(tiny_folder, tmp_path / "adapter"), dtype="float32")
    if kind == "left":
        lm = gerund.load(tiny_folder, attention="bidir", prompt="it is: ", dtype="float32")
        lm.tokenizer.padding_side = "left"
        return lm
    return gerund.load(tiny_folder, attention=kind, dtype="float32")


KINDS = ["causal", "mask0-bidir", "inter-bidir", "echo", "left", "adapter", "t5"]


@pytest.mark.filterwarnings(*PEFT_WARNINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_begins_as_the_encoder_and_the_model_stays(kind, tiny_folder, t5_folder, tmp_path):
    lm = loaded(kind, tiny_folder, t5_folder, tmp_path)
    vectors = lm.encode(TEXTS, normalize=False, empty="zeros")
    state = {name: tensor.clone() for name, tensor in lm.model.state_dict().items()}
    tokens = text_tokens(lm.runtime, TEXTS, empty="zeros")
    # A classifier whose layer hands the vector on.
    classifier = TextClassifier(copied(lm.runtime), lm.dimensions).eval()
    classifier.classifier = torch.nn.Identity()
    found = classifier(**_inputs(lm.runtime, tokens)).logits.detach().numpy()
    full = [place for place, text in enumerate(TEXTS) if text]
    np.testing.assert_allclose(found[full], vectors[full], rtol=1e-4, atol=1e-4)
    random = torch.random.get_rng_state()
    trained = fine_tuned(lm.runtime, tokens, [0, 1, 1, 0], HOW)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert predicted(trained, lm.runtime, tokens)[:2] == [0, 1]
    assert all(torch.equal(state[name], tensor) for name, tensor in lm.model.state_dict().items())
    np.testing.assert_array_equal(lm.encode(TEXTS, normalize=False, empty="zeros"), vectors)
    assert not trained.training
    before = dict(copied(lm.runtime).model.named_parameters())
    changed = [not torch.equal(weight, before[name]) for name, weight in trained.model.named_parameters()]
    assert sum(changed) > 0.8 * len(changed)


@pytest.mark.slow
def test_the_score_is_of_what_is_predicted(task, tiny_folder):
    lm = gerund.load(tiny_folder, attention="bidir")
    score = task.run(language_model_system("tiny", lm), EvaluationConfig())
    train, test = task.learnt_and_scored(EvaluationConfig())
    sample = FewShot(name="few-shot/made-up", files=task.files)._samples(train, EvaluationConfig())[10, 0]
    names = sorted(set(train.labels))
    labels = [names.index(train.labels[place]) for place in sample]
    how = How(task.epochs, task.learning_rate, task.batch_size, seed=0)
    classifier = fine_tuned(lm.runtime, text_tokens(lm.runtime, [train.texts[place] for place in sample]), labels, how)
    found = [names[label] for label in predicted(classifier, lm.runtime, text_tokens(lm.runtime, test.texts))]
    assert score.value == sum(a == b for a, b in zip(found, test.labels, strict=True)) / 15
    assert (score.main, score.size, score.runs, score.spread) == ("accuracy", 15, 1, None)
    assert score.notes == ("1 of 3 classes have fewer than 10 training examples and give all of theirs",)
    assert score.value > 0.6
    assert task.run(language_model_system("tiny", lm), EvaluationConfig()) == score


@pytest.mark.slow
def test_several_samples_have_a_spread_and_prompts_are_read(task, tiny_folder):
    one = language_model_system("tiny", gerund.load(tiny_folder))
    score = replace(task, runs=2, epochs=1).run(one, EvaluationConfig(prompts={"fine-tuning": "what: "}))
    assert score.runs == 2
    assert score.spread is not None
    assert task.texts(EvaluationConfig()) == []


def test_one_class_needs_no_training(task, tiny_folder):
    lm = gerund.load(tiny_folder)
    assert task.run(language_model_system("tiny", lm), EvaluationConfig(limit=1)).size == 1


def test_only_its_name_means_it(task, tmp_path):
    for names, there in (
        (["all"], False),
        (["representation"], False),
        (["fine-tuning"], True),
        (["fine-tuning/*"], True),
    ):
        assert ("fine-tuning/made-up" in {one.name for one in select(names, tmp_path)}) == there, names


def test_bad_input(task, tiny_folder):
    for config, message in (
        ({"shots": 0}, "shots is 1 or more"),
        ({"epochs": 0}, "epochs is 1 or more"),
        ({"learning_rate": 0.0}, "learning_rate lies between 0 and 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            replace(task, **config)
    lm = gerund.load(tiny_folder)
    with torch.no_grad():
        lm.model.get_input_embeddings().weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="the loss is not finite"):
        task.run(language_model_system("tiny", lm), EvaluationConfig())
    write_classification(task.files[0].parents[2], test=[("a pear", "pear")])
    with pytest.raises(DataError, match="no example of label 'pear'"):
        task.run(language_model_system("tiny", lm), EvaluationConfig())


def test_bfloat16_weights_are_trained_in_float32(tmp_path):
    lm = gerund.load(save_tiny(tmp_path / "b"), dtype="bfloat16")
    assert {weight.dtype for weight in copied(lm.runtime).model.parameters()} == {torch.float32}
    assert lm.model.dtype == torch.bfloat16
