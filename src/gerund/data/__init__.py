"""Files of texts: documents read, training data made of them, and vectors of whole files."""
