"""The activation store: Zarr v3 arrays with a plan, commits and checksums.

Its functions take and return NumPy arrays. This package does not depend on models or commands. It
imports only three other modules of moa_data: ``errors``, ``files`` and ``text``.
"""
