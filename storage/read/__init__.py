"""Reads a store as NumPy arrays, verifies its files, and summarizes its contents.

This package never changes the files of a store.
"""
