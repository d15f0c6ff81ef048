"""A tiny model with a chat template, for the frameworks' chat classes."""

from functools import cache

from gerund import EncoderConfig
from gerund.language_model import LanguageModel
from tests.inference.generate.test_prompts import chat_tokenizer
from tests.tiny import tiny


@cache
def chat_model(context: int = 512) -> LanguageModel:
    """Return one model of noise, which all tests share; none changes it."""
    tokenizer = chat_tokenizer()
    tokenizer.model_max_length = context
    model = tiny("llama", vocab_size=len(tokenizer), max_position_embeddings=context)
    return LanguageModel(model, tokenizer, EncoderConfig(prompts={"query": "Q:", "document": "D:"}))
