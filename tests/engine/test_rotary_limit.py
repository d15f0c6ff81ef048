"""An engine around a model that turns keys otherwise in long texts: long ones beside them change no others."""

from gerund import Engine, EngineConfig
from gerund.inference.generate.config import GenerationConfig
from tests.engine.common import alone, held, tiny_lm
from tests.inference.long_rotary import long_rotary

PROMPTS = ("fox jumps up", "cold river", "zebu", "quick")
LIMIT = 52
LONG = "rivers run down" + "w" * 40
CROSSING = "k" * 49


def test_texts_do_not_depend_on_longer_ones_beside_them() -> None:
    lm = tiny_lm("phi3", **long_rotary(LIMIT))
    settings = GenerationConfig.of(7, None, {})
    prompts = [LONG, CROSSING, *PROMPTS]
    with Engine(lm, EngineConfig(slots=8)) as engine:
        with held(engine):
            together = [engine.submit_generate(prompt, settings) for prompt in prompts]
        found = [future.result(30)[0].text for future in together]
        assert engine.state().context == LIMIT
    assert found == [alone(lm, prompt, settings)[0].text for prompt in prompts]


def test_vectors_do_not_depend_on_longer_texts_beside_them() -> None:
    lm = tiny_lm("phi3", **long_rotary(LIMIT))
    with Engine(lm) as engine:
        alone_, beside = (
            engine.submit_encode([PROMPTS[0]]).result(30),
            engine.submit_encode([PROMPTS[0], LONG]).result(30),
        )
    assert abs(alone_.vectors[0] - beside.vectors[0]).max() < 1e-5
