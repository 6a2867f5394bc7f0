"""Compares the drafts of another engine with ours, and finds the mistake that explains differences.

``run`` asks the engine and repeats its rounds, ``wrong_choices`` lists known mistakes, and
``other_side`` is the script that runs in the engine's Python. Only ``commands`` imports this
package.
"""
