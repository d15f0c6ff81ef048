"""Systems under evaluation: language models, sentence-transformers models, BM25, hybrid search and indices."""
