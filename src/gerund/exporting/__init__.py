"""Export formats, one file per format."""
