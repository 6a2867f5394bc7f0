"""The client: drafts, has its drafts verified, goes on alone without a network, and takes back what was wrong.

Never loads the target, nor imports the engine.
"""
