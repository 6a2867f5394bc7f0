"""Writes a store: its parts and their commits, added fields, and repairs.

All changes to a store are made by this package. It does not run a model.
"""
