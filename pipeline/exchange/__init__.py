"""Export and import of stores in other projects' file formats, and torch datasets over a store.

``trainer/export.py`` exports drafters.
"""
