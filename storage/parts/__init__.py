"""What a store consists of on disk: the plan, the shards of a part, its commit, the manifest's seal.

Files and their formats only; reading values lives in ``read``, making parts in ``write``.
"""
