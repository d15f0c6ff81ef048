"""What clients may send, as pydantic models: the bodies of all routes and their parts."""
