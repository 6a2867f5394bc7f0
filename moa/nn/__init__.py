"""Building blocks of drafters: layers, masks, losses, and the KV cache.

Nothing here depends on a specific drafter, a store or a training run.
"""
