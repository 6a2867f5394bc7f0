"""Helpers shared by the tests of several folders.

The package builds tiny models, tokenizers, chats and stores, and runs servers that fail on purpose.
Tests, and processes that tests start, import it as ``moa_data.tests.kit``. It contains no tests.
"""
