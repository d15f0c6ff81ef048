"""The mathematics of the objectives: tensors in, sums out."""
