"""What shows results: tables, ``results.json``, plots, and pages of one HTML file each.

``evaluation`` writes the report of an evaluation, ``pages`` has a module for each page, and ``plots`` turns numbers
into figures.
"""
