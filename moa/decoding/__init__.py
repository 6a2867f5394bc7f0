"""Lossless speculative decoding: draft, verify and accept chains and trees of drafts.

The code here uses drafters only through their interface.
"""
