"""Says which continuation belongs to a prefix."""
