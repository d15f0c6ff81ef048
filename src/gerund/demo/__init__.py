"""``gerund demo``: one model searches, generates, ranks and infills, and a page shows the results."""
