"""Texts into vectors: one pass of the model, batches, pooling, words."""
