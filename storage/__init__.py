"""The activation store: Zarr v3 arrays with a plan, commits and checksums.

The functions of this package take and return NumPy arrays. The package does not depend on models or
commands. It imports only three other modules of moa_data: ``errors``, ``files`` and ``text``.
"""
