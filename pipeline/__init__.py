"""Text to stored activations: chats, tokens and response masks, one target forward, the store.

What a store is lives in ``storage``; this is where the target runs.
"""
