"""Looking after a store: what it holds, what of it is damaged, and how to mend that.

Nothing here runs a model.
"""
