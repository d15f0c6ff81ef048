"""Evaluation tasks on local data, one file per kind of question; lm-evaluation-harness by name."""
