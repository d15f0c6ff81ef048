"""Encode texts into vectors."""
