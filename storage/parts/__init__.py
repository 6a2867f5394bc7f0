"""The files of a store: the plan, the shards of a part, commits of parts, of target/ and of the manifest.

Files and their formats only; values are read in ``read``, parts are written in ``write``.
"""
