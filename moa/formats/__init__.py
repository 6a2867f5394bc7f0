"""Drafter checkpoints in this project's layout, and in those of authors and engines.

The modules convert names and shapes of tensors. They do not run drafters.
"""
