"""The server, in front of one engine: the interfaces of OpenAI and Cohere, infilling, search, attention, a page."""
