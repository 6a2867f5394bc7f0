"""Compares another engine's drafts with this package's drafts, and finds why they differ.

``run`` runs the other engine, and repeats all draft rounds with this package. ``wrong_choices``
lists known mistakes. ``other_side`` is the script that runs in the engine's Python. Only
``commands`` imports the package ``conform``.
"""
