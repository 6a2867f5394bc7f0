"""Measures decoding with a drafter beside plain decoding of the same prompts."""
