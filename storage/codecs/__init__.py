"""Codecs: from the values of a field to one or more stored arrays, each an ordinary Zarr array, and back.

``registry`` knows them by name. How a stored array becomes bytes is the same for all and lies in ``chunks``.
"""
