"""Continuous batching of sequences within a fixed amount of KV memory.

Sequences of any length join and leave the batch between two target calls. This package contains no
network code. When a caller adds a sequence, it passes a callback. After each target call that
serves the sequence, the engine passes the new tokens to this callback.
"""
