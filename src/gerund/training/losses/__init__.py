"""Losses on tensors, and the vectors that they compare."""
