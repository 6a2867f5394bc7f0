"""Exports and imports stores in the file formats of other projects; torch datasets over a store.

Drafters are exported by ``trainer/export.py``.
"""
