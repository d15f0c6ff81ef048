"""Training objectives: their settings, and modules with their batches and losses."""
