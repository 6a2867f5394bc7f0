"""Making a store: parts written, committed and added to by one process at a time.

Every change of a store that is not a repair goes through here.
"""
