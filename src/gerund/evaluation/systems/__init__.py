"""What is evaluated: a language model under one encoder config, BM25, models of others, hybrids, and indices."""
