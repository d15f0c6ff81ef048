"""gerund: one language model that writes, embeds, fills in and re-ranks, with the same weights."""

__version__ = "0.1.0"
