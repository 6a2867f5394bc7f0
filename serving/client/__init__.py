"""The client: drafts, has its drafts verified, writes on without a network, and takes back what was wrong.

Never loads the target, nor imports the engine.
"""
