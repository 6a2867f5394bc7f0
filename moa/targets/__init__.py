"""The target: frozen weights for training, a live model for extraction and decoding, a KV cache.

Nothing in this package depends on drafters.
"""
