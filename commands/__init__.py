"""The commands of ``moa-data``, one file a family; the only code that prints, reads arguments and exits.

Each imports its stage when it runs, so that ``--help`` answers at once.
"""
