"""Run moto's S3 server: python moto_server.py HOST PORT.

S3 checks the condition of a conditional write and writes the object in one atomic step. moto takes
two steps, so that two concurrent writers can both succeed. This server serializes its writes.

moto's command looks for the service of each request, which takes as long as the answer. This server
knows S3 only, writes no log, and parses each time of a change once.
"""

import sys
import threading
from functools import cache

from moto.core import serialize
from moto.moto_server.werkzeug_app import MotoRequestHandler, create_backend_app
from moto.s3.responses import S3Response
from werkzeug.serving import run_simple

_WRITES = threading.Lock()
_put_object = S3Response.put_object


def put_object(self: S3Response) -> object:
    """Write an object while no other write runs."""
    with _WRITES:
        return _put_object(self)


class SilentHandler(MotoRequestHandler):
    """Answers requests without logging them."""

    def log(self, type: str, message: str, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    S3Response.put_object = put_object  # type: ignore[method-assign, assignment]
    parse = serialize.parse_to_aware_datetime  # type: ignore[attr-defined]
    serialize.parse_to_aware_datetime = cache(parse)  # type: ignore[attr-defined]
    run_simple(
        sys.argv[1],
        int(sys.argv[2]),
        create_backend_app("s3"),
        threaded=True,
        request_handler=SilentHandler,
    )
