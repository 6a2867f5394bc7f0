"""Training of drafters with Lightning from a store alone, and the export of what was trained.

The target is never loaded; losses and masks live in ``moa``. One training step, from the command down::

    fit        train -> _fit: a whole run
    step       DrafterModule.training_step: one micro-batch
    moa        Drafter.objective: its loss

Around it: ``config`` (settings), ``data`` (what is read, and how), ``callbacks`` and ``checkpoints`` (what happens
between steps), ``muon``, ``export``; ``sensitivity`` measures a trained drafter for codecs.
"""
