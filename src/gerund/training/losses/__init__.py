"""The mathematics of the objectives: losses on tensors, and what they are computed from."""
