"""The activation store: Zarr v3 arrays with a plan, commits and checksums.

This package does not depend on models or commands. Its functions take and return NumPy arrays. The
only other modules of moa_data that it imports are ``errors``, ``files`` and ``text``.
"""
