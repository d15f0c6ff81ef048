"""Writing an encoder for other tools: merged weights, folders for sentence-transformers, converted checkpoints."""
