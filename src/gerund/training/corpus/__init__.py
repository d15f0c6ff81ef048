"""Where training texts come from: files, tokens, the order they are dealt in."""
