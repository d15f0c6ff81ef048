"""Searching one's own documents: read, cut into chunks, embedded, stored, found by words and vectors, quoted."""
