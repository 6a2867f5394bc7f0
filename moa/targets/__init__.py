"""The target: its frozen weights for training, the live model for extraction and decoding, its cache.

Nothing here knows a drafter.
"""
