"""Stores to and from the layouts of other projects, and torch datasets over a store.

Drafters are exported by ``trainer/export``.
"""
