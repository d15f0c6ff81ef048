"""Models written for other tools: merged weights, sentence-transformers, ONNX, OpenVINO, GGUF."""
