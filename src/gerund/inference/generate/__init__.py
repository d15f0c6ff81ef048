"""Text behind a prompt: sampling, streaming, re-ranking while it is written."""
