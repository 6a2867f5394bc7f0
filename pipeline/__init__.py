"""Text to activations: chats, tokens and response masks, the target's forward, and the store."""
