"""Train drafters with Lightning from a store alone, and export them.

The target is never loaded. Losses and masks are defined in ``moa``. The calls of one training
step::

    fit        train -> _fit: a whole run
    step       DrafterModule.training_step: one micro-batch
    moa        Drafter.objective: its loss

The other modules: ``config`` (settings), ``data`` (which sequences are read, in which order, and
how), ``callbacks`` and ``checkpoints`` (everything between steps), ``muon``, ``export``.
``sensitivity`` measures which errors of stored keys and values matter to a trained drafter; codecs
use the result.
"""
