"""Request bodies as pydantic models, one file per family."""
