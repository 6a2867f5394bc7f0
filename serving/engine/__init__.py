"""Continuous batching: sequences of any length join and leave between target calls, within a bound on KV memory.

Knows no network: who listens to a sequence gives a function that is called with each commit.
"""
