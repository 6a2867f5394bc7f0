"""Building blocks of drafters: layers, masks, losses, and the KV cache.

Nothing in this package depends on a specific drafter, on an activation store or on a training run.
"""
