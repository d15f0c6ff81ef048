"""Inference: encode, generate, infill and score text, as plain functions of a model, a tokenizer and settings."""
