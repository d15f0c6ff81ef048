"""Reads documents and makes training data of them."""
