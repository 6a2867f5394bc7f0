"""The drafters: one per file, with the interface in ``base``. ``registry`` lists them.

The shapes of drafts and the sampling are in ``decoding``. Checkpoints of other projects are in
``formats``.
"""
