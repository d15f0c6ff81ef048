"""The tasks, one file a kind; each file finds its tasks in a folder of data."""
