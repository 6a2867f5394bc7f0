"""The connection to a server: one gRPC stream at a time, made again when it ends, in a thread of its own.

Its user takes events off a queue, in order. Streams are numbered, so that nothing that was meant for one is sent on the
next.
"""

# gRPC's blocking interface: the asynchronous one fails where a process has several event loops, as
# a program that uses
# this client may.

import contextlib
import queue
import random
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

# waits between two attempts to connect; each is twice the one before
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
# an attempt is given up after this long: a packet of the handshake was lost, or nobody is there
_CONNECT_S = 5.0
# gRPC's thread that watches a channel fails, with a traceback on the terminal, if the channel is
# closed before it has
# noticed that nobody listens any more.
_CLOSED_AFTER_S = 2.0
_GRPC_PORT = "give the gRPC port of `moa-data serve`, 8001 by default"
_FRAME_BYTES = 5  # what gRPC puts before each message
_OPTIONS = (
    *CLIENT_OPTIONS,
    # else a new channel inherits the waits of an old one to the same server
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 16 << 20),
)
# Errors by status; with any other a new attempt may help.
_ERRORS = {STATUSES[code]: error for code, error in ERRORS.items()} | {
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed
}
_READY = grpc.ChannelConnectivity.READY
_FAILED = grpc.ChannelConnectivity.TRANSIENT_FAILURE


@dataclass(frozen=True)
class LinkEvent:
    """A stream is there, has brought a message, or has ended or could not be made (``stream`` 0), as the error says."""

    stream: int
    message: pb.ServerMessage | None = None
    error: ServingError | None = None
    at_s: float = field(default_factory=time.monotonic)


class Link:
    """Connects to a server while it is wanted, and again whenever the connection ends.

    TLS is used with ``https://HOST:PORT`` or a certificate authority, by default those that the system trusts.
    """

    def __init__(self, server: str, token: str = "", ca: str | Path | None = None) -> None:
        scheme, separator, address = server.rpartition("://")
        host, _, port = address.rpartition(":")
        is_port = port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16
        if (separator and scheme not in ("http", "https", "grpc")) or not (host and is_port):
            raise RequestInvalid(
                f"{server!r} is not the address of a server; give HOST:PORT, or https://HOST:PORT for TLS."
            )
        self.address = address
        self._credentials = _credentials(ca) if ca is not None or scheme == "https" else None
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.bytes_up = self.bytes_down = 0  # of messages sent and received so far
        self._events: queue.SimpleQueue[LinkEvent] = queue.SimpleQueue()
        # Guards all that follows, which the user's threads and the link's own change.
        self._changed = threading.Condition()
        self._is_wanted = self._is_cut = self._is_closed = False
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        # number of the stream that is there, 0 for none; of all so far
        self._stream = self._n_streams = 0
        self._states: queue.SimpleQueue[grpc.ChannelConnectivity | None] = queue.SimpleQueue()
        self._reason = ""  # why the user of this link ended the stream
        self._wait_s = _FIRST_WAIT_S
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Make a stream, and events of it alone."""
        self.end()
        with self._changed:
            self._changed.wait_for(lambda: self._call is None)  # it ends at once: nothing is wanted
            self._events = queue.SimpleQueue()
            self._is_wanted = True
            self._wait_s = _FIRST_WAIT_S
            self._changed.notify_all()

    def end(self) -> None:
        """End the stream; what was sent on it is still delivered where that takes no time."""
        with self._changed:
            self._is_wanted = False
            self._outbox.put(None)
            call = self._call
        if call is not None:
            _later(0.2, call.cancel)  # the server ends its half when it has read a Close

    def send(self, stream: int, messages: Sequence[pb.ClientMessage]) -> None:
        """Send messages on a stream; if it is gone, they are."""
        with self._changed:
            if stream != self._stream:
                return
            for message in messages:
                data = message.SerializeToString()
                self.bytes_up += len(data) + _FRAME_BYTES
                self._outbox.put(data)

    def take(self, timeout_s: float) -> list[LinkEvent]:
        """Return the events so far, in order; waits for one, but not longer than the timeout."""
        found: list[LinkEvent] = []
        with contextlib.suppress(queue.Empty):
            found.append(
                self._events.get(timeout=timeout_s) if timeout_s > 0 else self._events.get_nowait()
            )
            while True:
                found.append(self._events.get_nowait())
        return found

    def reconnect(self, reason: str, wait_s: float = 0.0) -> None:
        """End the stream, and make another one on a new connection after so many seconds at least."""
        with self._changed:
            self._reason, self._wait_s = reason, max(self._wait_s, wait_s)
            self._drop()

    def cut(self) -> None:
        """Close the connection and make none until :meth:`restore`, as if the network were gone."""
        with self._changed:
            self._is_cut = True
            self._reason = "the network was cut on this side."
            self._drop()

    def restore(self) -> None:
        """Connect again."""
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
                self._drop()  # whatever ended the stream, the connection under it is suspect
                # Random, for clients that a server lost at once shall not come back at once.
                wait_s = self._wait_s * random.uniform(0.8, 1.2)
                self._wait_s = min(2 * self._wait_s, _LONGEST_WAIT_S)
                self._changed.wait_for(lambda: self._is_cut or self._is_closed, wait_s)

    def _connect(self) -> grpc.Channel:
        """Return a channel that has spoken with the server; the one of the stream before where it is still good."""
        with self._changed:
            if self._channel is not None:
                return self._channel
            if self._credentials is None:
                channel = grpc.insecure_channel(self.address, options=_OPTIONS)
            else:
                channel = grpc.secure_channel(self.address, self._credentials, options=_OPTIONS)
            self._channel = channel
            states = self._states = queue.SimpleQueue()
        with contextlib.suppress(ValueError):  # it was closed meanwhile
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
            self._reason or f"{self.address} did not answer within {_CONNECT_S:g} s."
        )

    def _refusal(self, channel: grpc.Channel) -> ServingError:
        try:
            next(_session(channel)(iter(()), timeout=1.0))
        except grpc.RpcError as failure:
            reason = " ".join(str(failure.details()).split()).rpartition("last error: ")[2]
            if "WRONG_VERSION_NUMBER" in reason:
                return ProtocolMismatch(
                    f"{self.address} speaks no TLS; leave out --ca, or give it a certificate."
                )
            if "certificate" in reason.lower():
                return ProtocolMismatch(
                    f"{self.address} has no certificate of the given authority; give its --ca."
                )
            if "HTTP/2" in reason or "ALPN" in reason:
                return ProtocolMismatch(f"{self.address} is not a gRPC port; {_GRPC_PORT}.")
            return Disconnected(f"{self.address} cannot be reached ({reason[:200]}).")
        except (StopIteration, ValueError):
            pass
        return Disconnected(self._reason or f"{self.address} cannot be reached.")

    def _run_stream(self, channel: grpc.Channel) -> bool:
        """Run a stream until it ends; returns whether that was meant."""
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
        error: ServingError = Disconnected(f"{self.address} ended the stream.")
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
            outbox.put(None)  # ends gRPC's thread that reads it
            was_meant = not self._is_wanted
            events.put(LinkEvent(stream, error=error))
            self._changed.notify_all()
        return was_meant

    def _error_of(self, failure: Any) -> ServingError:
        if self._reason:
            return Disconnected(self._reason)
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatch(f"{self.address} does not speak moa.v1; {_GRPC_PORT}.")
        details = " ".join(str(failure.details() or failure.code()).split())
        return _ERRORS.get(failure.code(), Disconnected)(details)

    def _drop(self) -> None:
        """Close the connection and wake all that wait for it; the lock is held."""
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
            f"the certificate authority {ca} cannot be read: {error.strerror}."
        ) from error
    if b"-----BEGIN CERTIFICATE-----" not in certificates:
        raise RequestInvalid(f"{ca} holds no certificate in PEM; give the file of the authority.")
    return grpc.ssl_channel_credentials(root_certificates=certificates)
