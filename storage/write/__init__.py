"""Writes a store: its parts and their commits, added fields, and repairs.

No other package changes the files of a store. This package does not run a model.
"""
