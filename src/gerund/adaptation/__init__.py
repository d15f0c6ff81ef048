"""Adapt a model to a folder of documents: make pairs, train, and evaluate search before and after."""
