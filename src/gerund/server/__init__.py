"""An HTTP server with OpenAI's interface, and Cohere's rerank, vLLM's and llama.cpp's routes."""
