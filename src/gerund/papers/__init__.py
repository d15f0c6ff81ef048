"""Reproduction of the five papers' tables: data makers, evaluation tasks and prompts."""
