"""The commands of ``moa-data``, one file per family of commands.

Only this package reads arguments, prints and exits. A command calls a stage, a function elsewhere
in the package. It imports the stage only when it runs, so that ``--help`` is fast.
"""
