"""What generates without torch writes the texts of the same packed model under torch."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError

import gerund
from gerund import ModelSpec, Sampling
from gerund.errors import ConfigError
from gerund.gguf_file import read_file
from gerund.inference.generate.packed_decoder import PackedWriter
from gerund.inference.generate.prompts import TemplateOptions, render
from gerund.inference.text_ids import encode_texts
from gerund.light_entry import light_writer, load_writer
from gerund.models import gguf_tokenizer, light_runtime, light_tokenizer
from gerund.models.light_runtime import light_source
from gerund.models.light_tokenizer import read_light_tokenizer
from gerund.models.tokenizer_cache import settings_of
from tests.inference.generate.test_prompts import HELLO, chat_tokenizer

PROMPTS = ["the cat", "once upon a time there was a dog in the garden", "", "the cat", "naïve café"]
SMOLLM2 = Path(__file__).resolve().parents[3] / "real" / "SmolLM2-135M-Instruct.Q4_1.gguf"
# Runs commands, some modules left out, and says what they imported of that which they should do without.
PROGRAM = """
import io, json, sys
from contextlib import redirect_stdout, suppress
commands, missing = json.loads(sys.argv[1])
sys.modules.update(dict.fromkeys(missing))
from gerund.cli.main import main
for words, given in commands:
    sys.argv, sys.stdin = ["gerund", *words], io.TextIOWrapper(io.BytesIO(given.encode()))
    said = io.StringIO()
    with redirect_stdout(said), suppress(SystemExit):
        main()
    print(json.dumps(said.getvalue()))
print(json.dumps([name for name in ("torch", "transformers", "onnx") if sys.modules.get(name)]))
"""
TORCH = ("torch", "transformers", "peft", "accelerate")


@pytest.fixture(scope="module")
def light(file: Path) -> PackedWriter:
    writer = light_writer(ModelSpec.of(file, runtime="packed"))
    assert writer is not None
    return writer


@pytest.fixture(scope="module")
def lm(file: Path) -> gerund.LanguageModel:
    return gerund.load(file, attention="causal", runtime="packed")


@pytest.mark.parametrize(
    ("settings", "n"),
    [
        ({}, 1),
        ({"sampling": Sampling(temperature=0.9, top_p=0.9, seed=3), "n": 3}, 3),
        ({"sampling": Sampling(temperature=1.0, top_k=20, seed=4, repetition_penalty=1.4, presence_penalty=0.5)}, 1),
        ({"sampling": Sampling(temperature=1.1, typical_p=0.6, seed=5), "batch_size": 2, "stop": ["e"]}, 1),
        ({"min_tokens": 4, "bad_words": ["a"], "ignore_eos": True}, 1),
    ],
)
def test_texts_are_those_under_torch(light: PackedWriter, lm: gerund.LanguageModel, settings: Any, n: int):
    own = light.generate(PROMPTS, 20, logprobs=2, **settings)
    under_torch = lm.generate(PROMPTS, 20, logprobs=2, **settings)
    assert len(own) == n * len(PROMPTS)
    for one, other in zip(own, under_torch, strict=True):
        assert (one.text, one.token_ids, one.finished, one.stop, one.usage) == (
            other.text,
            other.token_ids,
            other.finished,
            other.stop,
            other.usage,
        )
        assert one.score == pytest.approx(other.score, abs=1e-5)
        assert [each.token_id for each in one.logprobs or ()] == one.token_ids


def test_a_text_does_not_depend_on_the_others(light: PackedWriter):
    sampling = Sampling(temperature=1.0, seed=1)
    prompts = [*PROMPTS[:3], "x " * 100]
    together = light.generate(prompts, 80, sampling, ignore_eos=True, batch_size=3)  # caches grow
    alone = [light.generate(prompt, 80, sampling, ignore_eos=True)[0] for prompt in prompts]
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert all(len(one.token_ids) == 80 for one in alone)


def test_a_conversation_is_streamed(light: PackedWriter, lm: gerund.LanguageModel):
    stream = light.stream(HELLO, 12)
    assert "".join(stream) == lm.chat(HELLO, 12)[0].text
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    pytest.importorskip("llguidance")
    assert json.loads(light.chat(HELLO, 40, schema=schema)[0].text).keys() <= {"a"}
    with light.stream("the cat", 400) as stopped:
        next(stopped)
    with pytest.raises(ConfigError, match="ranked by runtime torch"):
        light.generate("a", 2, rerank=gerund.Rerank(2))


def test_a_tokenizer_is_that_of_transformers(light: PackedWriter, lm: gerund.LanguageModel):
    own, other = light.tokenizer, lm.tokenizer
    texts = ["the cat", "naïve <|im_start|> café", "  two  spaces\n", "<s>x</s>", ""]
    for settings in ({}, {"specials": False, "offsets": True}, {"parses_control": True}):
        assert encode_texts(own, texts, **settings) == encode_texts(other, texts, **settings)
    assert own.get_vocab() == other.get_vocab()
    for name in ("bos", "eos", "unk", "pad"):
        for field in (f"{name}_token", f"{name}_token_id"):
            assert getattr(own, field) == getattr(other, field), field
    for field in ("special_tokens_map", "all_special_tokens", "all_special_ids", "model_max_length", "padding_side"):
        assert getattr(own, field) == getattr(other, field), field
    assert (len(own), own.chat_template) == (len(other), other.chat_template)
    assert own.num_special_tokens_to_add() == other.num_special_tokens_to_add()
    typed = [{"role": "user", "content": "hi <|im_end|>"}]
    for messages in (HELLO, typed):
        assert render(own, messages) == render(other, messages)
        assert render(own, messages).literal == render(other, messages).literal
    begun = [*HELLO, {"role": "assistant", "content": "I am "}]
    continued = TemplateOptions(add_generation_prompt=False, continue_final_message=True)
    assert render(own, begun, continued) == render(other, begun, continued)


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{% if loop.last %}{% break %}{% endif %}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% set ns.x = ns.x + 1 %}{{ ns.x }}{{ dict(a=1)['a'] }}{{ tools is none }}",
        "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}{{ add_generation_prompt }}{{ documents }}",
        "{%- for m in messages %}\n  {{- m.content | trim }}\n{%- endfor %}\n",
        "{% for m in messages %}<{{ m.content }}>{% endfor %}",
    ],
)
def test_templates_are_rendered_as_by_transformers(light: PackedWriter, template: str):
    other = chat_tokenizer()
    other.chat_template = template
    expected = other.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    own = light_tokenizer.LightTokenizer(other.backend_tokenizer, settings_of(other, [], {}))
    assert own.apply_chat_template(HELLO, add_generation_prompt=True) == expected
    if ".content" in template:
        begun = [{"role": "user", "content": "the cat "}]
        expected = other.apply_chat_template(begun, tokenize=False, continue_final_message=True)
        assert own.apply_chat_template(begun, continue_final_message=True) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__ }}{{ ''.__class__.__mro__ }}",
        "{% set ns = namespace(__class__=1) %}",
    ],
)
def test_templates_reach_nothing_else(light: PackedWriter, template: str):
    with pytest.raises(TemplateError):
        light_tokenizer._compiled(template).render(messages=HELLO)


def test_a_tokenizer_is_made_once(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read_light_tokenizer(file, tmp_path)
    made = []
    real = gguf_tokenizer.made_tokenizer
    monkeypatch.setattr(gguf_tokenizer, "made_tokenizer", lambda one: made.append(one) or real(one))
    expected = read_light_tokenizer(file, tmp_path).get_vocab()
    assert not made
    [stored] = tmp_path.glob("*/tokenizer.json")
    stored.write_bytes(stored.read_bytes().replace(b"the", b"eth", 1))
    assert read_light_tokenizer(file, tmp_path).get_vocab() == expected
    assert len(made) == 1  # what was changed is made again, and kept
    read_light_tokenizer(file, tmp_path)
    assert len(made) == 1


def test_a_large_vocabulary_is_cached_under_torch_too(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(gguf_tokenizer, "_WORTH_KEEPING", 1)
    expected = gguf_tokenizer.read_tokenizer(read_file(file))
    monkeypatch.setattr(gguf_tokenizer, "made_tokenizer", lambda one: pytest.fail("made again"))
    found = gguf_tokenizer.read_tokenizer(read_file(file))
    assert found.backend_tokenizer.to_str() == expected.backend_tokenizer.to_str()
    assert found.special_tokens_map == expected.special_tokens_map
    assert (found.chat_template, found.init_kwargs) == (expected.chat_template, expected.init_kwargs)


def test_torch_is_left_out_only_where_nothing_needs_it(file: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(light_runtime, "may_have_gpu", lambda: False)

    def taken(model: Any = file, **settings: Any) -> bool:
        return light_source(ModelSpec.of(model, **settings)) is not None

    assert taken()
    assert taken(runtime="packed", device="cpu", adapter="none")
    for settings in ({"runtime": "torch"}, {"dtype": "float32"}, {"device": "meta"}, {"adapter": "some"}, {"k": 1}):
        assert not taken(**settings), settings
    assert not taken(tiny_folder)
    assert not taken(None)
    monkeypatch.setattr(light_runtime, "may_have_gpu", lambda: True)
    assert not taken()
    assert taken(device="cpu")
    assert isinstance(load_writer(ModelSpec.of(file, device="cpu"), only_writes=True), PackedWriter)
    assert isinstance(load_writer(ModelSpec.of(file, device="cpu")), gerund.LanguageModel)


def run(*commands: tuple[list[object], str], missing: Sequence[str] = ()) -> tuple[list[str], list[str], str]:
    """Run commands, each with its standard input, in a process of their own where some modules cannot be imported.

    Returns:
        What each wrote, what was imported of that which they should do without, and the messages.
    """
    given = json.dumps([[(list(map(str, words)), stdin) for words, stdin in commands], missing])
    done = subprocess.run([sys.executable, "-c", PROGRAM, given], capture_output=True, text=True, check=False)
    *said, imported = [json.loads(line) for line in done.stdout.splitlines()]
    return said, imported, done.stderr


def test_commands_do_without_torch(file: Path, light: PackedWriter):
    assert light is not None  # which built its graph
    common = ["--device", "cpu", "--max-new-tokens", 6]
    commands = (["generate", "the cat", "-m", file, *common], ""), (["chat", file, *common], "the cat")
    (written, said), *rest = run(*commands)
    assert rest == [[], ""]
    assert written == "the cat" + light.generate("the cat", 6)[0].text + "\n"
    assert said == light.chat([{"role": "user", "content": "the cat"}], 6)[0].text + "\n"


@pytest.mark.full  # a tiny file is tried in the same way above
@pytest.mark.skipif(not SMOLLM2.is_file(), reason="there is no SmolLM2 in ../real")
def test_a_real_file_is_written_alike():
    light, lm = light_writer(ModelSpec.of(SMOLLM2, device="cpu")), gerund.load(SMOLLM2, runtime="packed")
    assert light is not None
    prompts = ["The capital of France is", "Once upon a time, there was", "def fib(n):"]
    for sampling in (Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=3)):
        own, other = light.generate(prompts, 16, sampling), lm.generate(prompts, 16, sampling)
        assert [one.text for one in own] == [one.text for one in other]
    before = os.times()
    run((["generate", "The capital of France is", "-m", SMOLLM2, "--max-new-tokens", 1, "--device", "cpu"], ""))
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 5  # 1.5 with Python's own cache and an idle processor


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a setting of glibc")
@pytest.mark.parametrize("returns", [True, False])
def test_freed_memory_returns_to_the_system(returns: bool):
    # Blocks below one that stays are given back only where each is mapped by itself.
    program = f"""
import os
import numpy as np
from gerund.models.light_runtime import return_freed_memory
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20
if {returns}:
    return_freed_memory()
np.ones(2**21)  # 16 MiB, after which glibc keeps blocks of that size
before = resident()
arrays = [np.ones(2**20) for _ in range(8)]
stays = [bytearray(100_000) for _ in range(20)]
del arrays
print(resident() - before)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    kept = float(ended.stdout)
    assert kept < 4 if returns else kept > 32
