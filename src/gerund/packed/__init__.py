"""Run quantized models on CPUs: one ONNX graph per model whose attention masks are inputs."""
