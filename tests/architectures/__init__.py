"""Every causal language model of the installed transformers, tiny and random, against the slow and obvious way.

`python -m tests.architectures` writes docs/models.md; `--transformers FOLDER` asks another installation.
"""
