"""Helpers that tests of several folders share: tiny models, tokenizers, chats, stores, checks of hostile files.

Imported as ``moa_data.tests.kit``, by tests and by the processes that they start; it holds no tests of its own.
"""
