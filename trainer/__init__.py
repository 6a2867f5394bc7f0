"""Train drafters with Lightning from a store alone, and export them.

The target is never loaded. Losses and masks are defined in ``moa``. A run goes through these
functions, from the outermost to the innermost::

    fit        train -> _fit: a whole run
    step       DrafterModule.training_step: one micro-batch
    moa        Drafter.objective: its loss

The other modules: ``config`` (settings), ``data`` (which sequences are read, in which order, and
how), ``callbacks`` and ``checkpoints`` (everything between steps), ``muon``, ``export``.
``sensitivity`` measures which errors of stored keys and values matter to a trained drafter. Codecs
use this measurement to spend their bits.
"""
