"""Plots: functions from numbers to a matplotlib figure; ``style`` turns a figure into a file."""
