"""Turn chats into stored activations.

The chats are tokenised, the target runs over the tokens, and its activations are written to a
store. The stages and their settings are in this folder. ``forwards`` runs the target, ``exchange``
reads and writes the formats of other projects, and ``moa_data.storage`` defines the format of a
store.
"""
