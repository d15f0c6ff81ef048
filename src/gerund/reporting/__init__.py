"""Reports: tables, ``results.json``, plots, and HTML pages that are single files."""
