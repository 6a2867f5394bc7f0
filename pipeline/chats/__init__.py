"""Turns datasets into token sequences: rows, splits, messages, the chat template, response masks.

Every row that gives no sequence is counted here with its reason. Nothing here runs a target or knows a store.
"""
