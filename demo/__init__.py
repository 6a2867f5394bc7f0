"""The demo: runs all stages in turn, from a generated corpus to a measured drafter.

The demo needs neither a network nor an accelerator. For each stage, the demo calls the same code as
the command of ``moa-data`` for this stage.
"""
