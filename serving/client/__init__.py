"""The client: drafts locally, has drafts verified, works offline, and rolls back wrong drafts.

It never loads the target and never imports the engine.
"""
