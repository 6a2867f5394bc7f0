"""Codecs convert the values of a field to one or more stored arrays, and back.

Each stored array is an ordinary Zarr array. ``storage.chunk`` later encodes the values of this
array to bytes, for all codecs in the same way. ``registry`` finds a codec by its name.
"""
