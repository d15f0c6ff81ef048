"""Infill blanks in a text, using the text on both sides."""
