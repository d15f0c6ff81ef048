"""One model, many callers at once: writing, encoding and other work side by side, by one thread that owns the model."""
