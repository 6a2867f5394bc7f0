"""Drafter checkpoints in this project's own layout, and in those of authors and inference engines.

The modules handle names and shapes of tensors. They do not compute with drafters.
"""
