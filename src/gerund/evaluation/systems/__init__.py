"""What is evaluated: a language model under one encoder config, BM25, sentence-transformers models, and hybrids."""
