"""Integrations with other libraries, one file per library; each needs its library installed."""
