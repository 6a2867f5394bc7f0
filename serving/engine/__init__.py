"""Continuous batching of sequences within a fixed amount of KV memory.

Sequences of any length join and leave the batch between two target calls. This package contains no
network code: whoever adds a sequence passes a callback, which gets every commit of the sequence.
"""
