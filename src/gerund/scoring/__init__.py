"""Score continuations of a prefix, and rank documents for a query."""
