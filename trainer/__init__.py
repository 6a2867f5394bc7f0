"""Training of drafters with Lightning from a store alone, and the export of what was trained.

The target is never loaded here; losses and masks live in ``moa``.
"""
