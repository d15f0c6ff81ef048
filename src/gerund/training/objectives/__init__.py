"""Training objectives: their settings, and one module each with their batches and losses."""
