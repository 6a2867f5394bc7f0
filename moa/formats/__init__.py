"""Drafter checkpoints: this project's own, and the layouts of the authors and of inference engines.

Names and shapes of tensors only; no arithmetic of drafters.
"""
