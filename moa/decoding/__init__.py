"""Lossless speculative decoding: draft, verify, accept, for chains and trees of drafts.

Knows drafters by their interface alone.
"""
