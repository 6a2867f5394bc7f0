"""One training or validation step: the Lightning module, optimizer and schedule.

Losses are the drafters' own; files and signals are left to ``trainer/checkpoints`` and ``trainer/fit``.
"""
