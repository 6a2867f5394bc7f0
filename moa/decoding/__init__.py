"""Lossless speculative decoding: draft, verify and accept chains and trees of drafts.

Drafters are used only through the interface in ``drafters/base.py``.
"""
