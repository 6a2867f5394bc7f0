"""The demo: runs all stages in turn, from a generated corpus to a measured drafter.

The demo needs neither a network nor an accelerator. It calls the stages as a user would, and has no
own implementation of them.
"""
