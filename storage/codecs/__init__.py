"""Codecs convert the values of a field (such as keys and values) to stored arrays, and back.

A codec makes one or more stored arrays of a field. Each of them is an ordinary Zarr array.
``storage.chunk`` later encodes the values of these arrays to bytes, in the same way for all codecs.
``registry`` finds a codec by its name.
"""
