"""The demo: all stages in turn, from a generated corpus to a measured drafter.

The demo needs neither a network nor an accelerator. It calls the other stages as a user would, and
contains no second implementation of them.
"""
