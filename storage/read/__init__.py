"""Reading a store: sequences and batches as NumPy arrays, by byte ranges.

Nothing here changes a file.
"""
