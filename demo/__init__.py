"""The demo: runs all stages in turn, from a generated corpus to a measured drafter.

The demo needs neither a network nor an accelerator. It calls the same code for each stage as the
commands of ``moa-data`` do.
"""
