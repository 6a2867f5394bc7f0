"""The drafters. ``base`` defines their interface, and ``registry`` lists all kinds of drafters.

Each kind of drafter has its own file. Block-parallel drafters share a file.

The shapes of drafts and the sampling are in ``decoding``. Checkpoints of other projects are in
``formats``.
"""
