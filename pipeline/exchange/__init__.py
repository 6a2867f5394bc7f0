"""Stores to and from the file formats of other projects, and torch datasets over a store.

Drafters are exported by ``trainer/export``.
"""
