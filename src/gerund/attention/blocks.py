"""Block size for prefilling and caching prompts; imports no torch."""

BLOCK = 32
"""Tokens of a prompt that are read, kept and found again together."""


def whole_blocks(tokens: int) -> int:
    """Return how many keys there are of so many tokens, the last block filled up."""
    return -(-tokens // BLOCK) * BLOCK
