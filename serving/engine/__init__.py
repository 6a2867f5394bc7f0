"""Continuous batching of sequences within a fixed amount of KV memory.

Sequences of any length join and leave the batch between two target calls. This package contains no
network code. The caller that adds a sequence passes a callback. After each target call, the engine
calls it with the new tokens of the sequence.
"""
