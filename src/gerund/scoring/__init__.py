"""Scores: which continuation belongs to a prefix, and which document to a query."""
