"""Codecs convert the values of a field to one or more stored arrays, and back.

Each stored array is an ordinary Zarr array. All codecs store the bytes of an array in the same way,
see ``storage.chunk``. ``registry`` finds a codec by its name.
"""
