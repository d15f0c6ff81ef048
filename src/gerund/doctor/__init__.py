"""The doctor: what a model is, whether the attention plan reaches it, and what to do about its sinks.

``results`` are the values that ``diagnostics`` finds out, with the sentences that say what they mean.
"""
