"""Drafter checkpoints: the layout of this project, and the layouts of authors and engines.

The modules convert names and shapes of tensors. They do not run drafters.
"""
