"""Codecs: from a field's values to stored arrays and back, and from an inner chunk's values to its bytes.

A *field codec* (``field.FieldCodec``) turns the values of one field into one or more *stored arrays*, each an ordinary
Zarr array. ``registry`` knows them by name. ``chunk`` is the lossless byte chain that every stored array shares.
"""
