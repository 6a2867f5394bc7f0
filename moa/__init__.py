"""Drafters, the target weights that they need, decoding with both, and checkpoint formats.

Nothing here knows a store: tensors in, tensors out.
"""
