"""Codecs turn the values of a field into one or more stored arrays, each an ordinary Zarr array, and back.

``registry`` finds them by name. How a stored array becomes bytes is the same for all, see ``parts.chunk``.
"""
