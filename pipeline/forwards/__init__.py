"""The target's forward passes: batches of a part, what is captured of them, and the codec's calibration.

Plans and commits are made in ``pipeline/jobs``.
"""
