"""The target: its frozen pieces for training, the live model for extraction and decoding, its cache.

Nothing here knows a drafter.
"""
