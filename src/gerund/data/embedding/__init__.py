"""Embed a table of any size into a file, part by part."""
