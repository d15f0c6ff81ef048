"""Serve many callers with one model: generation, encoding and other work, batched in the one thread that runs it."""
