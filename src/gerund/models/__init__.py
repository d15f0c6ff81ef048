"""Find and load models, tokenizers, adapters and projection heads; compute fingerprints."""
