"""Reads a store as NumPy arrays, verifies it, and summarizes what it holds.

Nothing in this package changes a file.
"""
