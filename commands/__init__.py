"""The commands of ``moa-data``, one file per family.

Only this package prints, reads arguments and exits. Each command imports its stage when it runs, so
that ``--help`` is fast.
"""
