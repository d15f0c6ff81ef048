"""Trains a model by a recipe."""
