"""Measurements of decoding: drafters beside plain decoding of the same prompts, and drafters that go on alone.

Decoding itself lives in ``moa.decoding``; here are prompts, timing, statistics and reports.
"""
