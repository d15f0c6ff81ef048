"""Routes with the bodies of their requests, one file per family: generation, embeddings, Ollama and others."""
