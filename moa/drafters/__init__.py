"""The drafters. Each has its own file; ``base`` is their interface, and ``registry`` lists them.

The shapes of drafts and the sampling are in ``decoding``. Checkpoints of other projects are in
``formats``.
"""
