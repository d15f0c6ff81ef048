"""Run one model for many callers: batched generation and encoding, and other calls, in a single thread."""
