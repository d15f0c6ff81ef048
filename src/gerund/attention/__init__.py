"""To which tokens each layer of a language model attends: the heart of gerund.

``plan`` names the layouts and resolves them for n layers, ``masks`` says which token attends to which, ``interface``
brings the masks into the model, ``streams`` adds the layouts that run layers twice, and ``probe`` verifies
that all of it reached every layer. Nothing here knows tokenizers, pooling or texts.
"""
