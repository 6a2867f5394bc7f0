"""Reads and writes drafter checkpoints: this project's own, and the layouts of authors and inference engines.

Names and shapes of tensors only; no arithmetic of drafters.
"""
