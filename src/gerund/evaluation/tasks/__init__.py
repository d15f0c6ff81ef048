"""The tasks, one file a kind: found in a folder of data, or fetched by name from MTEB and lm-eval."""
