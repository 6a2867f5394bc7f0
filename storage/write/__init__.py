"""Writing a store: parts, their commits, additions of fields, and repairs.

Every change of a store goes through here; nothing here runs a model.
"""
