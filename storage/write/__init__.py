"""Writes stores: one process at a time writes parts, commits them and adds fields to them.

Every change of a store that is not a repair goes through here.
"""
