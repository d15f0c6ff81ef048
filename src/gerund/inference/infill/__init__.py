"""Gaps of a text, filled from both sides."""
