"""The drafters. Each file defines one, with the interface of ``base``; ``registry`` lists them.

Draft shapes, sampling and checkpoints of other projects live in ``decoding`` and ``formats``.
"""
