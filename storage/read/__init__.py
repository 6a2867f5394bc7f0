"""Reading a store: sequences and batches as NumPy arrays, by byte ranges, what it holds, and what of it is damaged.

Nothing here changes a file.
"""
