"""Turn chats into stored activations: tokens and response masks, the target's forward, the store.

The stages and their settings are in this folder. The target's forwards are in ``forwards``, other
projects' formats in ``exchange``, and the format of a store in ``moa_data.storage``.
"""
