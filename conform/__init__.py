"""Compares the drafts of another inference engine with ours, and finds the cause of differences.

``run`` runs the engine and repeats its draft rounds, ``wrong_choices`` lists known mistakes, and
``other_side`` is the script that runs in the engine's Python. Only ``commands`` imports this
package.
"""
