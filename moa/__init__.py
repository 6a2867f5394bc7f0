"""Drafters, their masks and losses, the key/value layout, and decoding with a target."""
