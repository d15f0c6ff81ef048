"""Routes, one file per family: generation, embeddings (with ranking and search), and information."""
