"""The commands of ``moa-data``, one file per family of commands.

Only this package reads arguments, prints and exits. The work of a command is done by a function of
another package. This function is called the stage of the command. A command imports its stage only
when the command runs, so that ``--help`` is fast.
"""
