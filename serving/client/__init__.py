"""The client: drafts locally, lets a server verify, writes offline, rolls back wrong drafts.

It never loads the target and never imports the engine.
"""
