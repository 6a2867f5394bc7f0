"""The transform codec: a learned basis per field, bits given to what carries variance.

Arithmetic on arrays only; how codecs are named and stored is in ``codecs/registry``.
"""
