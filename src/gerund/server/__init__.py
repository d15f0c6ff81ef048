"""The server: OpenAI's interface, Cohere's rerank and infilling, over HTTP, in front of one engine."""
