"""Generate text: sampling, streaming, batched decoding, sessions and re-ranked generation."""
