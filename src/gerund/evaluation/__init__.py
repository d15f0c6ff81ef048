"""Measures both sides of the trade, representation and generation, with the field's own evaluators."""
