"""The report of an evaluation: a table on the terminal, ``results.json``, and one page with pictures."""

from gerund.evaluation.report.writing import Report, write_report

__all__ = ["Report", "write_report"]
