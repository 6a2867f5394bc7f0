"""The drafters: one file each, with the interface of ``base``, entered in ``registry``.

Draft shapes, sampling and checkpoints of other projects live in ``decoding`` and ``formats``.
"""
