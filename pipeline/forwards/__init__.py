"""The target's forward passes: batches of a part, what is captured of them, and the codec's calibration.

Nothing here plans or commits; that is the business of ``pipeline/jobs``.
"""
