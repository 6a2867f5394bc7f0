"""Drafters, the weights that they need from their targets, decoding, and checkpoint formats.

No module in this package knows how stores are organized. Functions take and return tensors.
"""
