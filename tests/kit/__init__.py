"""What tests of several rooms share: tiny models, tokenizers, chats and stores, and the checks of hostile files.

Imported as ``moa_data.tests.kit``, by tests and by the processes that they start; it holds no tests of its own.
"""
