"""Files of evaluation data, read with errors that name file and line."""
