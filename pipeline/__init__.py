"""Text to stored activations: chats, tokens and response masks, one target forward, the store."""
