"""Activations of large language models as a dataset, and drafters for speculative decoding trained from it.

The folders are stages: ``pipeline`` writes what ``storage`` defines, ``trainer`` reads it and trains what ``moa``
defines, ``evaluation`` decodes and measures. ``cli`` is the only place that prints and exits.
"""

__version__ = "0.1.0"
