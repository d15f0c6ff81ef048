"""Where training texts come from: files, tokens, the order in which they are read, how they are formatted."""
