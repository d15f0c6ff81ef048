"""What ``gerund demo`` does: one set of weights searches, writes, ranks and fills gaps, and a page shows it."""
