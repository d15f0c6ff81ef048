"""The doctor: what a model is, whether the attention plan reaches it, and what to do about its sinks.

``findings`` says what an examination finds, ``examination`` finds it, ``advice`` puts it into plain sentences.
"""
