"""Maintenance of stores: what one holds, what of it is damaged, and how that is repaired.

Nothing here runs a model.
"""
