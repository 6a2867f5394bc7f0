"""The client: drafts locally, and lets a server verify the drafts.

Without a network it continues to write, and later rolls back wrong drafts. It never loads the
target and never imports the engine.
"""
