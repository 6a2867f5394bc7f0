"""Batches from a store: split, order, draws, reader threads and their buffers.

What a drafter does with a batch lives in ``moa/drafters``; nothing here knows Lightning's loop but the data module.
"""
