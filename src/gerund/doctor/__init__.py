"""``gerund doctor``: check whether a model supports an attention plan, and advise on its attention sinks."""
