"""Attention plans: which tokens each layer may attend to.

``masks`` has the predicates, ``bound_plan`` a plan for one batch, ``interface`` the attention functions of
transformers, ``layouts`` the plans that run layers twice, and ``probe`` verifies that a plan is applied in every layer.
Nothing here knows tokenizers, pooling or texts.
"""

BLOCK = 32
"""Tokens of a prompt that are read, kept and found again together."""


def whole_blocks(tokens: int) -> int:
    """Return how many keys there are of so many tokens, the last block filled up."""
    return -(-tokens // BLOCK) * BLOCK
