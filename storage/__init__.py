"""The activation store: Zarr v3 arrays with a plan, commits and checksums.

It knows no model and no command: NumPy in, NumPy out, and nothing of this package but ``errors`` and ``text``.
"""
