"""Reads files of model folders that somebody else made, with bounds on size, depth and kind.

No model code: names, shapes and bytes only.
"""
