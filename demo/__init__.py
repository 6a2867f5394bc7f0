"""Runs all stages in turn, from a generated corpus to a measured drafter, without network or accelerator.

It calls the other stages as a user would; nothing of them is written here a second time.
"""
