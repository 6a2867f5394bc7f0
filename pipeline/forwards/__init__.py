"""The target's forward passes: batches of a part, what is captured of them, and the codec's calibration.

Plans are made in ``pipeline/plan.py``, commits in ``storage/write``.
"""
