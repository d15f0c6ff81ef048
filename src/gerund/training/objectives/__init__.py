"""What a model can be trained for: one module each, and the registry of all."""
