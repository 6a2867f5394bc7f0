"""Run moto's S3 server: python moto_server.py HOST PORT.

S3 checks the condition of a conditional write and writes the object in one atomic step. moto takes
two steps, so that two concurrent writers can both succeed. This server serializes its writes.
"""

import sys
import threading

from moto.s3.responses import S3Response
from moto.server import main

_WRITES = threading.Lock()
_put_object = S3Response.put_object


def put_object(self: S3Response) -> object:
    """Write an object while no other write runs."""
    with _WRITES:
        return _put_object(self)


if __name__ == "__main__":
    S3Response.put_object = put_object  # type: ignore[method-assign, assignment]
    main(["-H", sys.argv[1], "-p", sys.argv[2]])
