"""Train drafters with Lightning from a store alone, and export them.

Training never loads the whole target. Instead, it reads the target's stored activations, and some
weights that the store also contains, such as the LM head. A run calls these functions, from the
outermost to the innermost::

    fit.train                            a whole run
    step.DrafterModule.training_step     one micro-batch
    Drafter.objective (in ``moa``)       the masks and the loss of the micro-batch

The other modules are ``config`` (settings), ``data`` and ``batches`` (choose, order and read the
sequences), ``callbacks`` and ``checkpoints`` (everything between steps), ``muon`` (an optimizer),
and ``export``. ``sensitivity`` measures how errors in stored keys and values change the output of a
trained drafter. Codecs use the result to give more bits to the values that matter.
"""
