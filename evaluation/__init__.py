"""Compares decoding with drafters to plain decoding, and measures drafters without their target.

Decoding itself is implemented in ``moa.decoding``. This package reads prompts, measures times,
computes statistics and writes reports.
"""
