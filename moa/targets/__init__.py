"""The target: frozen weights for training, the live model for extraction and decoding, its cache.

Nothing in this package depends on drafters.
"""
