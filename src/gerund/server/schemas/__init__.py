"""What clients may send, as pydantic models: one for each route that takes a body."""
