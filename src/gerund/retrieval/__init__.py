"""Index, search and question your documents: reading, chunking, embedding, storage, hybrid search, answers."""
