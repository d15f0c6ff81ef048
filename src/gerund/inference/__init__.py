"""The verbs as plain functions of a model, a tokenizer and settings."""
