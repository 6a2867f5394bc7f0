"""Files of a run: checkpoints that resume it, drafters that are exported.

Reading one executes nothing. When a checkpoint is written is decided in ``trainer/fit``.
"""
