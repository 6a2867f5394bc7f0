"""Text to stored activations: chats, tokens and response masks, one target forward, the store.

Settings and errors of the stage stand here, its work in the folders. What a store is lives in ``storage``.
"""
