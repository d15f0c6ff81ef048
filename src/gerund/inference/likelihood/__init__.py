"""How probable tokens and spans are."""
