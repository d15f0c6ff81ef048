"""Metrics as plain functions of texts, labels and vectors."""
