"""Lets the target answer the questions of a chat dataset again, so that drafters learn from its own words.

Chats come from ``pipeline.chats``, go into a journal, then into a dataset of the same form; nothing here makes a store.
"""
