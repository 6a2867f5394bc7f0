"""The commands of ``moa-data``, one file per family of commands.

Only this package reads arguments, prints and exits. The work of a command is done by a function of
another package, its stage. A command imports its stage only when it runs, so that ``--help`` is
fast.
"""
