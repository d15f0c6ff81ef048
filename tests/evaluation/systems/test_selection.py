"""Ways to read a model, as they are spelled on the command line."""

import pytest

from gerund.errors import ConfigError
from gerund.evaluation.systems.selection import distinct, label_of
from gerund.settings.encoder import EncoderConfig
from gerund.settings.model_spec import parse_encoder_spec
from gerund.settings.plan import AttentionPlan

OWN = EncoderConfig(AttentionPlan("mask0-bidir", k=3), pooling="weighted-mean", prompt="own: ")


def test_what_is_left_out_is_the_models_own():
    config = parse_encoder_spec("mask0-bidir").applied_to(OWN)
    assert config == OWN
    other = parse_encoder_spec("inplace-back:k=2").applied_to(OWN)
    assert other.attention == AttentionPlan("inplace-back", k=2)
    assert (other.pooling, other.prompt) == ("weighted-mean", "own: ")


def test_every_setting():
    text = "mask0+bidir:k=4,k0=2,sink_tokens=2,pooling=last,append_eos=true,prompt=A query, with a comma: "
    config = parse_encoder_spec(text).applied_to(OWN)
    assert config.attention == AttentionPlan("mask0+bidir", k=4, k0=2, sink_tokens=2)
    assert (config.pooling, config.append_eos, config.prompt) == ("last", True, "A query, with a comma: ")
    assert (
        parse_encoder_spec("inter-back:k=1,combine=mean,variant=released").applied_to(OWN).attention.variant
        == "released"
    )


def test_methods_without_training():
    text = "causal:layers=2-4,prepend=2,transform=whitening-8,pool_bos=never,template=prompteol,prompt=So: "
    config = parse_encoder_spec(text).applied_to(EncoderConfig())
    assert (config.layers, config.prepend, config.transform, config.pool_bos) == ("2-4", 2, "whitening-8", "never")
    assert (config.template, config.pooling, config.prompt) == ("prompteol", "last", "So: ")
    own = parse_encoder_spec("causal:layers=3,template=Say {text}, and go on").applied_to(EncoderConfig())
    assert (own.template, own.layers, own.pooling) == ("Say {text}, and go on", "3", "mean")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mask-1", "unknown attention plan 'mask-1'"),
        ("causal:poling=last", "unknown setting in 'causal:poling=last' 'poling'; valid are: k, k0"),
        ("mask0-bidir:k=two", "k is a whole number or auto, not 'two'"),
        ("mask0-bidir:k", "'k' has no value"),
        ("causal:append_eos=yes", "true or false"),
        ("causal:pooling=class", "unknown pooling 'class'"),
        ("causal:k=2", "takes no k"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_encoder_spec(text).applied_to(OWN)


def test_labels_tell_configs_apart():
    texts = ["causal", "echo", "causal:pooling=last", "causal:pooling=last,append_eos=true", "mask0-bidir:k=1",
             "mask0-bidir:k=1,sink_tokens=2", "mask0+bidir:k=3,k0=1", "inter-back:k=1,combine=mean",
             "causal:prompt=Say: ", "mask0-bidir:k=1,skips=3", "causal:skips=3", "causal:template=prompteol",
             "causal:template=prompteol,prepend=2", "causal:layers=all", "causal:transform=whitening",
             "causal:pool_bos=never", "causal:template={text}!"]  # fmt: skip
    labels = [label_of(parse_encoder_spec(text).applied_to(EncoderConfig()), 4) for text in texts]
    assert len(set(labels)) == len(texts)
    assert labels[:2] == ["causal", "echo"]
    assert labels[9:13] == ["mask0-bidir k=1 skips=3", "causal skips=3", "causal, last, prompteol",
                            "causal, last, prompteol, prepend 2"]  # fmt: skip
    assert distinct(["x", "y", "x", "x"]) == ["x", "y", "x (2)", "x (3)"]
