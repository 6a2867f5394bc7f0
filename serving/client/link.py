"""The connection to a server: one gRPC stream at a time, with reconnects, in its own thread.

The code that uses a link takes events from a queue, in order. Streams (gRPC calls) are numbered, so
that a message for one stream is never sent on the next stream.
"""

# This module uses gRPC's blocking interface. The asynchronous interface fails in a process with
# several event loops, and a program that uses this client may have several.

import contextlib
import queue
import random
import re
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from ...errors import Disconnected, NotAllowed, ProtocolMismatch, RequestInvalid, ServingError
from .. import moa_v1_pb2 as pb
from ..wire import CLIENT_OPTIONS, ERRORS, STATUSES

# The first and the longest wait between two attempts to connect. Each wait is twice as long as the
# previous one.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
# An attempt to connect is given up after this many seconds. Possible causes are a lost packet of
# the handshake, and a server that is not running.
_CONNECT_S = 5.0
# An unused channel is closed only after this many seconds. gRPC has a thread that watches the state
# of each channel. This thread continues for a moment after the link has stopped using the channel.
# If the channel were closed during this time, the thread would print a traceback.
_CLOSED_AFTER_S = 2.0
_SERVER = re.compile(r"((?P<scheme>http|https|grpc)://)?(?P<address>[^/]+:(?P<port>[0-9]{1,5}))")
_GRPC_PORT = "give the gRPC port of `moa-data serve`, 8001 by default"
_FRAME_BYTES = 5  # gRPC sends a header of this size before each message.
_OPTIONS = (
    *CLIENT_OPTIONS,
    # Without this option, a new channel would share the growing delay (backoff) of a failed channel
    # to the same server.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 16 << 20),
)
# gRPC status with which a stream ended -> error class. After any other status, the link tries to
# connect again.
_ERRORS = {STATUSES[code]: error for code, error in ERRORS.items()} | {
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed
}
_READY = grpc.ChannelConnectivity.READY
_FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE


@dataclass(frozen=True)
class LinkEvent:
    """An event of the connection.

    There are three kinds. An event with a message means that the stream has received this message.
    An event with an error means that the stream has ended, or that no stream could be started
    (``stream`` is 0). An event with neither means that the stream has started.
    """

    stream: int
    message: pb.ServerMessage | None = None
    error: ServingError | None = None
    at_s: float = field(default_factory=time.monotonic)


class Link:
    """Keeps a connection to a server from `begin` to `end`, and replaces a lost connection.

    TLS is used for ``https://HOST:PORT``, or if a certificate authority is given. By default the
    system's authorities are trusted.
    """

    def __init__(self, server: str, token: str = "", ca: str | Path | None = None) -> None:
        match = _SERVER.fullmatch(server)
        if match is None or not 0 < int(match["port"]) < 1 << 16:
            raise RequestInvalid(
                f"{server!r} is not the address of a server; give HOST:PORT, or https://HOST:PORT "
                "for TLS."
            )
        self.address = match["address"]
        uses_tls = ca is not None or match["scheme"] == "https"
        self._credentials = _credentials(ca) if uses_tls else None
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        # The number of bytes of all messages sent, and of all messages received.
        self.bytes_up = self.bytes_down = 0
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        # Guards the attributes below. The caller's threads and the link's own thread change them.
        self._changed = threading.Condition()
        self._is_wanted = self._is_cut = self._is_closed = False
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # ``_stream`` is the number of the current stream, or 0 if there is none. ``_n_streams`` is
        # the number of streams so far.
        self._stream = self._n_streams = 0
        self._states: queue.SimpleQueue[grpc.ChannelConnectivity | None] = queue.SimpleQueue()
        # Why the client itself ended the stream. Empty if the client did not end it.
        self._reason = ""
        self._wait_s = _FIRST_WAIT_S
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Start connecting, with an empty queue of events."""
        self.end()
        with self._changed:
            # Wait for the old stream to end. It ends soon, because `end` cancels it.
            self._changed.wait_for(lambda: self._call is None)
            self._events = queue.SimpleQueue()
            self._is_wanted = True
            self._wait_s = _FIRST_WAIT_S
            self._changed.notify_all()

    def end(self) -> None:
        """End the stream a moment later, so that messages that were sent can still arrive."""
        with self._changed:
            self._is_wanted = False
            self._outbox.put(None)
            call = self._call
        if call is not None:
            # When the server reads a Close message, it ends the stream itself. Give the server time
            # to do so, and then cancel the stream.
            _later(0.2, call.cancel)

    def send(self, stream: int, messages: Sequence[pb.ClientMessage]) -> None:
        """Send messages on a stream. If the stream has ended, drop them."""
        with self._changed:
            if stream != self._stream:
                return
            for message in messages:
                data = message.SerializeToString()
                self.bytes_up += len(data) + _FRAME_BYTES
                self._outbox.put(data)

    def take(self, timeout_s: float) -> list[LinkEvent]:
        """Return the new events, in order. If there are none, wait for one until the timeout."""
        events: list[LinkEvent] = []
        with contextlib.suppress(queue.Empty):
            events.append(self._events.get(timeout_s > 0, timeout_s))
            while True:
                events.append(self._events.get_nowait())
        return events

    def reconnect(self, reason: str, wait_s: float = 0.0) -> None:
        """End the stream, wait at least ``wait_s`` seconds, and start a new stream."""
        with self._changed:
            self._reason, self._wait_s = reason, max(self._wait_s, wait_s)
            self._drop()

    def cut(self) -> None:
        """Disconnect, as if the network were down, until :meth:`restore`."""
        with self._changed:
            self._is_cut = True
            self._reason = "the network is switched off in this client."
            self._drop()

    def restore(self) -> None:
        """Connect again after :meth:`cut`."""
        with self._changed:
            self._is_cut = False
            self._wait_s = _FIRST_WAIT_S
            self._changed.notify_all()

    def close(self) -> None:
        """End the stream, the connection and the thread."""
        with self._changed:
            self._is_closed = True
            self._drop()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_closed or (self._is_wanted and not self._is_cut)
                )
                if self._is_closed:
                    return
            try:
                if self._run_stream(self._connect()):
                    continue
            except ServingError as error:
                self._events.put(LinkEvent(0, error=error))
            with self._changed:
                # Use a new connection, because the old one may be the cause of the error.
                self._drop()
                # The wait is random, so that clients that lost a server together do not all
                # reconnect at the same time.
                wait_s = self._wait_s * random.uniform(0.8, 1.2)
                self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
                self._changed.wait_for(lambda: self._is_cut or self._is_closed, wait_s)

    def _connect(self) -> grpc.Channel:
        """Return a connected channel: the channel of the last stream if it is still open."""
        with self._changed:
            if self._channel is not None:
                return self._channel
            if self._credentials is None:
                channel = grpc.insecure_channel(self.address, options=_OPTIONS)
            else:
                channel = grpc.secure_channel(self.address, self._credentials, options=_OPTIONS)
            self._channel = channel
            states = self._states = queue.SimpleQueue()
        # Another thread may have closed this channel meanwhile. A closed channel raises ValueError.
        # Ignore the error here, because the code below reports that the channel is not connected.
        with contextlib.suppress(ValueError):
            channel.subscribe(states.put, try_to_connect=True)
        end_s = time.monotonic() + _CONNECT_S
        state: grpc.ChannelConnectivity | None = grpc.ChannelConnectivity.IDLE
        with contextlib.suppress(queue.Empty):
            while state not in (_READY, _FAILED, None):
                state = states.get(timeout=max(0.0, end_s - time.monotonic()))
        channel.unsubscribe(states.put)
        if state is _READY:
            return channel
        if state is _FAILED:
            raise self._refusal(channel)
        raise Disconnected(
            self._reason
            or f"the server {self.address} did not answer within {_CONNECT_S:g} s. Check the "
            "address, and whether the server runs."
        )

    def _refusal(self, channel: grpc.Channel) -> ServingError:
        try:
            next(_session(channel)(iter(()), timeout=1.0))
        except grpc.RpcError as failure:
            reason = " ".join(str(failure.details()).split()).rpartition("last error: ")[2]
            if "WRONG_VERSION_NUMBER" in reason:
                return ProtocolMismatch(
                    f"the server {self.address} does not use TLS. Leave out `ca` and https://, or "
                    "start the server as `moa-data serve --tls-cert FILE --tls-key FILE`."
                )
            if "certificate" in reason.lower():
                return ProtocolMismatch(
                    f"the certificate of the server {self.address} is not from a trusted "
                    "authority. Give the certificate file of its authority with `ca`."
                )
            if "HTTP/2" in reason or "ALPN" in reason:
                return ProtocolMismatch(f"{self.address} is not a gRPC port; {_GRPC_PORT}.")
            return Disconnected(
                f"the server {self.address} cannot be reached ({reason[:200]}). Check the address, "
                "and whether the server runs."
            )
        except (StopIteration, ValueError):
            pass
        return Disconnected(
            self._reason
            or f"the server {self.address} cannot be reached. Check the address, and whether the "
            "server runs."
        )

    def _run_stream(self, channel: grpc.Channel) -> bool:
        """Run a stream until it ends. Return whether this client ended the stream on purpose."""
        with self._changed:
            if self._channel is not channel or not self._is_wanted:
                return True
            outbox = self._outbox = queue.SimpleQueue()
            self._reason = ""
            self._call = _session(channel)(iter(outbox.get, None), metadata=self._metadata)
            self._n_streams += 1
            stream = self._stream = self._n_streams
            events = self._events
        events.put(LinkEvent(stream))
        error: ServingError = Disconnected(f"the server {self.address} closed the connection.")
        try:
            for message in self._call:
                self.bytes_down += message.ByteSize() + _FRAME_BYTES
                self._wait_s = _FIRST_WAIT_S
                events.put(LinkEvent(stream, message))
        except grpc.RpcError as failure:
            error = self._error_of(failure)
        with self._changed:
            self._call = None
            self._stream = 0
            outbox.put(None)  # gRPC's thread reads this queue. None tells the thread to end.
            was_meant = not self._is_wanted
            events.put(LinkEvent(stream, error=error))
            self._changed.notify_all()
        return was_meant

    def _error_of(self, failure: Any) -> ServingError:
        if self._reason:
            return Disconnected(self._reason)
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatch(
                f"the server {self.address} does not offer the drafting protocol moa.v1; "
                f"{_GRPC_PORT}."
            )
        details = " ".join(str(failure.details() or failure.code()).split())
        return _ERRORS.get(failure.code(), Disconnected)(details)

    def _drop(self) -> None:
        """Close the connection and wake all waiting threads. The caller holds the lock."""
        channel = self._channel
        self._channel = None
        self._stream = 0
        self._states.put(None)
        if self._call is not None:
            self._call.cancel()
        if channel is not None:
            _later(_CLOSED_AFTER_S, channel.close)
        self._changed.notify_all()


def _later(seconds: float, action: Any) -> None:
    timer = threading.Timer(seconds, action)
    timer.daemon = True
    timer.start()


def _session(channel: grpc.Channel) -> Any:
    return channel.stream_stream(
        "/moa.v1.Drafting/Session",
        request_serializer=lambda data: data,
        response_deserializer=pb.ServerMessage.FromString,
    )


def _credentials(ca: str | Path | None) -> grpc.ChannelCredentials:
    if ca is None:
        return grpc.ssl_channel_credentials()
    try:
        certificates = Path(ca).expanduser().read_bytes()
    except OSError as error:
        raise RequestInvalid(
            f"`ca={ca}` cannot be read ({error.strerror}). Give the certificate file of an "
            "authority."
        ) from error
    if b"-----BEGIN CERTIFICATE-----" not in certificates:
        raise RequestInvalid(
            f"`ca={ca}` contains no certificate in PEM format. Give the certificate file of the "
            "authority that signed the server's certificate."
        )
    return grpc.ssl_channel_credentials(root_certificates=certificates)
