"""Compares decoding with drafters to plain decoding, and measures drafters without their target.

Decoding itself is implemented in ``moa.decoding``. The package ``evaluation`` reads prompts,
measures times, computes statistics and writes reports.
"""
