"""Codecs convert the values of a field to one or more stored arrays, and back.

Each stored array is an ordinary Zarr array, and its bytes are encoded as ``storage.chunk``
describes, whatever the codec of the field is. ``registry`` finds a codec by its name.
"""
