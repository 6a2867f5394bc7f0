"""The transform codec: a learned basis per field, with bits for the components that carry variance.

Arithmetic on arrays only; how codecs are named and stored is in ``codecs/registry``.
"""
