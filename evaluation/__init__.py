"""Measures decoding: drafters beside plain decoding of the same prompts, and drafters without their target.

Decoding itself lives in ``moa.decoding``; here are prompts, timing, statistics and reports.
"""
