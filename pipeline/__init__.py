"""Text to stored activations: chats, tokens and response masks, one target forward, the store.

Settings and errors are here, the work is in the folders. What a store is lives in ``storage``.
"""
