"""A tiny model that turns keys otherwise once a text is long, as Phi-3 with a context of 128k does."""

from typing import Any


def long_rotary(limit: int) -> dict[str, Any]:
    """Return what changes ``tiny("phi3")`` into one that does so beyond so many tokens."""
    factors = dict(short_factor=[1.0] * 4, long_factor=[1.0, 2.0, 6.0, 12.0])
    return dict(
        sliding_window=None,
        max_position_embeddings=256,
        original_max_position_embeddings=limit,
        rope_parameters=dict(
            rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=limit, **factors
        ),
    )
