"""One command from a folder of documents to a model that was trained on them, measured before and after."""
