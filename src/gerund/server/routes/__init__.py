"""The routes, one file a kind; each turns a body into work for the engine, and its result into an answer."""
