"""What stands behind the URL of a store: an object store, or to read from any file system that fsspec knows."""

from __future__ import annotations

from urllib.parse import urlsplit

from ..paths import Bucket

OBJECT_SCHEMES = frozenset({"s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl"})


def bucket_at(url: str) -> Bucket:
    """Return what stands behind a URL; nothing is asked of it yet."""
    # Loaded when there is such a store: obstore takes a tenth of a second, fsspec more.
    if urlsplit(url).scheme.lower() in OBJECT_SCHEMES:
        from .object_bucket import ObjectBucket

        return ObjectBucket(url)
    from .fsspec_bucket import FsspecBucket

    return FsspecBucket(url)
