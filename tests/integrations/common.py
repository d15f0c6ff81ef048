"""What the tests of frameworks share: a tiny model with a chat template, texts and a conversation."""

from functools import cache

from gerund import EncoderConfig
from gerund.language_model import LanguageModel
from tests.inference.generate.test_prompts import HELLO as PLAIN_HELLO
from tests.inference.generate.test_prompts import chat_tokenizer
from tests.tiny import tiny

__all__ = ["PLAIN_HELLO", "TEXTS", "chat_model"]
TEXTS = ["Bread is made of flour.", "Trains need rails.", "Swallows nest in barns."]


@cache
def chat_model(context: int = 512) -> LanguageModel:
    """Return one model of noise, which all tests share; none changes it."""
    tokenizer = chat_tokenizer()
    tokenizer.model_max_length = context
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=context)
    return LanguageModel(model, tokenizer, EncoderConfig(prompts={"query": "Q:", "document": "D:"}))
