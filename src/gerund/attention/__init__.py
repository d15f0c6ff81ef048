"""Attention plans: which tokens each layer may attend to.

``masks`` has the predicates, ``bound_plan`` a plan for one batch, ``interface`` the attention functions of
transformers, ``layouts`` the plans that run layers twice, and ``probe`` verifies that a plan is applied in every layer.
Nothing here knows tokenizers, pooling or texts.
"""
