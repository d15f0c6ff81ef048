"""Run quantized models on CPUs: one ONNX graph per model whose attention masks are inputs."""

LEAST_READ = 16
"""Fewest tokens of a prompt that are read in one run: fewer take other kernels, and last bits would depend on that."""
