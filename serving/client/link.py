"""The connection to a server: one gRPC stream at a time, made again when it ends, in threads of its own.

Whoever uses it sees a queue of what happened, in order: a stream is there (:class:`Up`), a message came
(:class:`Arrival`), the stream is gone (:class:`Down`). Streams are numbered, so that nothing that was meant for one is
sent on the next.
"""

import contextlib
import queue
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from ...errors import Disconnected, NotAllowed, Overloaded, ProtocolMismatch, RequestInvalid, ServingError
from ..protocol import moa_v1_pb2 as pb
from ..protocol.channel import CLIENT_OPTIONS

_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.05, 1.0
"""Waits between two attempts to connect; each is twice the one before. Even the longest is not long for somebody who
watches a text that doesn't go on."""
_CONNECT_S = 5.0
"""An attempt is given up after this long: a packet of the handshake was lost, or nobody is there."""
_CLOSED_AFTER_S = 2.0
"""gRPC's thread that watches a channel notices after a while that nobody listens any more, and fails, with a traceback
on the terminal, if the channel is closed before."""
_GRPC_PORT = "give the gRPC port of `moa-data serve`, 8001 by default"
_FRAME_BYTES = 5
"""What gRPC puts before each message."""
_OPTIONS = (
    *CLIENT_OPTIONS,
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel inherits the waits of an old one to the same server
    ("grpc.enable_retries", 0),
    ("grpc.max_receive_message_length", 16 << 20),
    *CLIENT_OPTIONS,
)
_ERRORS: dict[grpc.StatusCode, type[ServingError]] = {
    grpc.StatusCode.UNAUTHENTICATED: NotAllowed,
    grpc.StatusCode.PERMISSION_DENIED: NotAllowed,
    grpc.StatusCode.INVALID_ARGUMENT: RequestInvalid,
    grpc.StatusCode.FAILED_PRECONDITION: ProtocolMismatch,
    grpc.StatusCode.UNIMPLEMENTED: ProtocolMismatch,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
}
"""Errors by status; with any other a new attempt may help."""


@dataclass(frozen=True)
class Up:
    """A stream is there."""

    stream: int


@dataclass(frozen=True)
class Arrival:
    """A message came, at a time of ``time.monotonic()``."""

    stream: int
    message: pb.ServerMessage
    at_s: float


@dataclass(frozen=True)
class Down:
    """A stream has ended, or could not be made (``stream`` 0); ``error`` says why."""

    stream: int
    error: ServingError


Happening = Up | Arrival | Down


class Link:
    """Connects to a server while it is wanted, and again whenever the connection ends.

    Args:
        server: ``HOST:PORT``, or ``https://HOST:PORT`` for TLS with the certificates that the system trusts.
        token: the bearer token; empty for none.
        ca: file of a certificate authority in PEM, which TLS is used with; None for the system's or no TLS.

    Attributes:
        bytes_up: bytes of messages sent so far.
        bytes_down: bytes of messages received so far.

    Raises:
        RequestInvalid: the address or the file cannot be used.
    """

    def __init__(self, server: str, token: str = "", ca: str | Path | None = None) -> None:
        scheme, separator, address = server.rpartition("://")
        if (separator and scheme not in ("http", "https", "grpc")) or not _is_address(address):
            raise RequestInvalid(f"{server!r} is no address of a server; give HOST:PORT, or https://HOST:PORT for TLS.")
        self.address = address
        self._credentials = _credentials(ca) if ca is not None or scheme == "https" else None
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self.bytes_up = self.bytes_down = 0
        self._happened: queue.SimpleQueue[Happening | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_wanted = self._is_cut = self._is_closed = False
        self._channel: grpc.Channel | None = None
        self._call: Any = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._stream = self._n_streams = 0  # number of the stream that is there, 0 for none; of all so far
        self._states: queue.SimpleQueue[grpc.ChannelConnectivity | None] = queue.SimpleQueue()
        self._reason = ""  # why the user of this link ended the stream
        self._wait_s = _FIRST_WAIT_S
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Want a stream from now on; what happened to earlier ones is forgotten."""
        self.end()
        with self._changed:
            while self._call is not None:  # ends at once: nothing is wanted
                self._changed.wait()
            self._happened = queue.SimpleQueue()
            self._is_wanted, self._wait_s = True, _FIRST_WAIT_S
            self._changed.notify_all()

    def end(self) -> None:
        """Want no stream any more; what was sent on the present one is still delivered where that takes no time."""
        with self._changed:
            self._is_wanted = False
            self._outbox.put(None)
            call = self._call
        if call is not None:
            # The server ends its half when it has read a Close.
            waiting = threading.Timer(0.2, call.cancel)
            waiting.daemon = True
            waiting.start()

    def send(self, stream: int, messages: Sequence[pb.ClientMessage]) -> None:
        """Send messages on a stream; if it is gone, they are."""
        with self._lock:
            if stream != self._stream:
                return
            for message in messages:
                data = message.SerializeToString()
                self.bytes_up += len(data) + _FRAME_BYTES
                self._outbox.put(data)

    def take(self, timeout_s: float) -> list[Happening]:
        """Hand over what happened, in order; waits for something to happen, but not longer than that."""
        found: list[Happening] = []
        with contextlib.suppress(queue.Empty):
            happening = self._happened.get(timeout=timeout_s) if timeout_s > 0 else self._happened.get_nowait()
            while True:
                if happening is not None:
                    found.append(happening)
                happening = self._happened.get_nowait()
        return found

    def wake(self) -> None:
        """Let :meth:`take` return, from another thread."""
        self._happened.put(None)

    def reconnect(self, reason: str, wait_s: float = 0.0) -> None:
        """End the stream, and make another one on a new connection after some time at least."""
        with self._lock:
            self._reason, self._wait_s = reason, max(self._wait_s, wait_s)
            self._drop()

    def cut(self) -> None:
        """Close the connection and make none until :meth:`mend`, as if the network were gone."""
        with self._changed:
            self._is_cut, self._reason = True, "the network was cut on this side."
            self._drop()
            self._changed.notify_all()

    def mend(self) -> None:
        """Connect again."""
        with self._changed:
            self._is_cut, self._wait_s = False, _FIRST_WAIT_S
            self._changed.notify_all()

    @property
    def is_cut(self) -> bool:
        """Whether :meth:`cut` holds."""
        return self._is_cut

    def close(self) -> None:
        """End the stream, the connection and the thread."""
        with self._changed:
            self._is_closed = True
            self._drop()
            self._changed.notify_all()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        while self._wait_until_wanted():
            try:
                if self._exchange(self._connected()):
                    continue
            except ServingError as error:
                self._happened.put(Down(0, error))
            with self._changed:
                self._drop()  # whatever ended the stream, the connection under it is suspect
                self._changed.wait_for(lambda: self._is_cut or self._is_closed, self._next_wait_s())

    def _wait_until_wanted(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or (self._is_wanted and not self._is_cut))
            return not self._is_closed

    def _next_wait_s(self) -> float:
        wait_s, self._wait_s = self._wait_s, min(2 * self._wait_s, _LONGEST_WAIT_S)
        return wait_s * random.uniform(0.8, 1.2)  # clients that a server lost at once don't come back at once

    def _connected(self) -> grpc.Channel:
        """Return a channel that has spoken with the server; the one of the stream before where it is still good.

        Raises:
            Disconnected: nobody answers.
            ProtocolMismatch: not with TLS of this kind.
        """
        with self._lock:
            if self._channel is not None:
                return self._channel
            channel = self._channel = self._new_channel()
            states = self._states = queue.SimpleQueue()
        with contextlib.suppress(ValueError):  # it was closed meanwhile
            channel.subscribe(states.put, try_to_connect=True)
        end_s = time.monotonic() + _CONNECT_S
        state: grpc.ChannelConnectivity | None = grpc.ChannelConnectivity.IDLE
        with contextlib.suppress(queue.Empty):
            while state not in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE, None):
                state = states.get(timeout=max(0.0, end_s - time.monotonic()))
        channel.unsubscribe(states.put)
        if state is grpc.ChannelConnectivity.READY:
            return channel
        if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
            raise self._refusal(channel)
        raise Disconnected(self._reason or f"{self.address} did not answer within {_CONNECT_S:g} s.")

    def _new_channel(self) -> grpc.Channel:
        if self._credentials is None:
            return grpc.insecure_channel(self.address, options=_OPTIONS)
        return grpc.secure_channel(self.address, self._credentials, options=_OPTIONS)

    def _refusal(self, channel: grpc.Channel) -> ServingError:
        """Find out why a connection failed."""
        try:
            next(_session(channel)(iter(()), timeout=1.0))
        except grpc.RpcError as failure:
            reason = " ".join(str(failure.details()).split()).rpartition("last error: ")[2]
            if "WRONG_VERSION_NUMBER" in reason:
                return ProtocolMismatch(f"{self.address} speaks no TLS; leave out --ca, or give it a certificate.")
            if "certificate" in reason.lower():
                return ProtocolMismatch(f"{self.address} has no certificate of the given authority; give its --ca.")
            if "HTTP/2" in reason or "ALPN" in reason:
                return ProtocolMismatch(f"{self.address} is no gRPC port; {_GRPC_PORT}.")
            return Disconnected(f"{self.address} cannot be reached ({reason[:200]}).")
        except (StopIteration, ValueError):
            pass
        return Disconnected(self._reason or f"{self.address} cannot be reached.")

    def _exchange(self, channel: grpc.Channel) -> bool:
        """Run a stream until it ends; returns whether that was meant."""
        with self._lock:
            if self._channel is not channel or not self._is_wanted:
                return True
            outbox = self._outbox = queue.SimpleQueue()
            self._reason = ""
            self._call = _session(channel)(iter(outbox.get, None), metadata=self._metadata)
            self._n_streams += 1
            stream = self._stream = self._n_streams
            happened = self._happened
        happened.put(Up(stream))
        error: ServingError = Disconnected(f"{self.address} ended the stream.")
        try:
            for message in self._call:
                self.bytes_down += message.ByteSize() + _FRAME_BYTES
                self._wait_s = _FIRST_WAIT_S
                happened.put(Arrival(stream, message, time.monotonic()))
        except grpc.RpcError as failure:
            error = self._error_of(failure)
        with self._changed:
            self._call, self._stream = None, 0
            outbox.put(None)  # ends gRPC's thread that reads it
            was_meant = not self._is_wanted
            happened.put(Down(stream, error))
            self._changed.notify_all()
        return was_meant

    def _error_of(self, failure: Any) -> ServingError:
        """Turn how a stream ended into an error of ours."""
        if self._reason:
            return Disconnected(self._reason)
        details = " ".join(str(failure.details() or failure.code()).split())
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
            return ProtocolMismatch(f"{self.address} does not speak moa.v1; {_GRPC_PORT}.")
        return _ERRORS.get(failure.code(), Disconnected)(details)

    def _drop(self) -> None:
        """Close the connection and wake whoever waits for it; the lock is held."""
        channel, self._channel, self._stream = self._channel, None, 0
        self._states.put(None)
        if self._call is not None:
            self._call.cancel()
        if channel is not None:
            closing = threading.Timer(_CLOSED_AFTER_S, channel.close)
            closing.daemon = True
            closing.start()


def _session(channel: grpc.Channel) -> Any:
    """The method of the service for messages that are bytes already."""
    return channel.stream_stream(
        "/moa.v1.Drafting/Session",
        request_serializer=lambda data: data,
        response_deserializer=pb.ServerMessage.FromString,
    )


def _is_address(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16


def _credentials(ca: str | Path | None) -> grpc.ChannelCredentials:
    if ca is None:
        return grpc.ssl_channel_credentials()
    try:
        certificates = Path(ca).expanduser().read_bytes()
    except OSError as error:
        raise RequestInvalid(f"the certificate authority {ca} cannot be read: {error.strerror}.") from error
    if b"-----BEGIN CERTIFICATE-----" not in certificates:
        raise RequestInvalid(f"{ca} holds no certificate in PEM; give the file of the authority.")
    return grpc.ssl_channel_credentials(root_certificates=certificates)
