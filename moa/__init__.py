"""Drafters, the pieces of the target that they need, decoding with both, and checkpoint formats.

Nothing here knows a store: tensors in, tensors out.
"""
