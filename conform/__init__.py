"""Compares another engine's drafts with this package's drafts, and finds why they differ.

The module ``run`` runs the other engine, and repeats all draft rounds with this package.
``wrong_choices`` lists known mistakes in the computation of drafts. ``other_side`` is the script
that runs in the engine's Python. Only ``commands`` imports the package ``conform``.
"""
