"""The client: drafts locally, and lets a server verify the drafts.

Without a network, the client continues to write drafts, and later rolls back the wrong ones. It
never loads the target and never imports the engine.
"""
