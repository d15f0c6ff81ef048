"""Training texts and pairs: read, tokenise, order and format them, and encode them with a teacher."""
