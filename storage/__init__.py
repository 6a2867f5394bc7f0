"""The activation store: Zarr v3 arrays with a plan, commits and checksums.

This package does not depend on models or commands. Its functions take and return NumPy arrays. From
the rest of moa_data it imports only ``errors``, ``files`` and ``text``.
"""
