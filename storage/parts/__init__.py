"""What a store consists of on disk: the plan, the shards of a part, commits of parts, of target/ and of the manifest.

Files and their formats only; reading values lives in ``read``, making parts in ``write``.
"""
