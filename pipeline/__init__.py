"""Turn chats into stored activations.

The chats are tokenised, the target runs over the tokens, and its activations are written to a
store. This folder contains the stages and their settings. The subfolder ``forwards`` runs the
target, and the subfolder ``exchange`` reads and writes the formats of other projects.
``moa_data.storage`` defines the format of a store.
"""
