"""Codecs convert the values of a field to one or more stored arrays, and back.

Each stored array is an ordinary Zarr array. With every codec, ``storage.chunk`` encodes the values
of the arrays to bytes. ``registry`` finds a codec by its name.
"""
