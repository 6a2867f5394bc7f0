"""Building blocks of drafters: layers, masks, losses, keys and values.

Nothing here knows a drafter, a store or a training run.
"""
