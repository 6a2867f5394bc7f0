"""Training of drafters with Lightning from a store alone, and the export of what was trained.

Settings, errors and file names are here. The target is never loaded; losses and masks live in ``moa``.
"""
