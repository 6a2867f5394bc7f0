"""Settings of `moa-data serve`, which the engine and the servers use directly.

This module does not import torch, because the command line reads it for its help.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field
from typing_extensions import override

from ..config import Common, Config, Count, NonNegative, Positive, TargetSettings

if TYPE_CHECKING:
    from ..moa.decoding.tree import TreeShape

Port = Annotated[int, Field(ge=0, lt=1 << 16)]


class EngineOptions(Config):
    """Limits of the engine."""

    kv_tokens: Count = 16384
    """Capacity of the KV cache in tokens, shared by all sequences. Idle sequences are evicted
    first, and prefilled again when they continue."""
    max_sequences: Count = 32
    """Maximum number of sequences in a target call."""
    max_waiting: Count = 256
    """Maximum number of open sequences beyond max_sequences; a further one is refused as
    overloaded."""
    prefill_chunk: Count = 256
    """Prompt tokens prefilled by a target call, over all sequences. More is faster; less delays
    other sequences less."""
    max_drafts: Count = 64
    """Maximum number of a client's drafts that one target call verifies."""
    tree: str = "auto"
    """Shape of the server's own drafts: a chain's length such as 5, LENGTH@PROBABILITY, or
    DEPTHxBREADTHxNODES. auto: 10@0.2, and no drafts while drafting does not pay."""
    target_ms: NonNegative = 0.0
    """Minimum milliseconds of a target call, to simulate a slower target."""

    @property
    def shape(self) -> "TreeShape | None":
        """The shape of the server's own drafts; None for auto.

        Raises:
            DrafterError: ``tree`` is not a shape.
        """
        from ..moa.decoding.tree import TreeShape  # Imports torch.

        return None if self.tree == "auto" else TreeShape.parse(self.tree)

    @override
    def problems(self) -> list[str]:
        return self.refusal_of(lambda: self.shape)


class LimitOptions(Config):
    """Limits on connections, and on the requests of one client."""

    max_body_bytes: Count = 1 << 20
    """Maximum bytes of a request, or of a gRPC message."""
    body_s: Positive = 30.0
    """Seconds within which a request's body must arrive."""
    answer_s: NonNegative = 600.0
    """Seconds after which an answer ends, complete or not; 0 for no limit."""
    max_new_tokens: Count = 4096
    """Maximum tokens of an answer."""
    requests_per_s: NonNegative = 0.0
    """Maximum requests per second of one token or, without tokens, one address; 0 for no limit."""
    requests_at_once: Count = 32
    """Maximum burst of requests after a pause."""
    max_connections: Count = 1024
    """Maximum open connections. A further one replaces the one that has waited longest for a
    request; if all are being answered, it gets 503."""
    max_connections_each: Count = 256
    """Maximum open connections of one address, with the same rule. A proxy in front has one address
    for all its clients."""
    head_s: Positive = 15.0
    """Seconds within which the head of a request must arrive, or a gRPC stream must open its
    session; includes a TLS handshake."""
    write_s: Positive = 30.0
    """Seconds within which a reader must take the next part of its answer."""


class DraftingOptions(Config):
    """Limits of the gRPC server, whose clients draft themselves."""

    max_sessions: Count = 256
    """Maximum number of drafting sessions of all clients, connected or not."""
    max_sessions_each: Count = 64
    """Maximum number of sessions of one bearer token or, without tokens, one address."""
    messages_per_s: Positive = 200.0
    """Maximum messages per second of one session; further ones are read later."""
    idle_s: Positive = 600.0
    """Seconds without messages after which a session is removed."""
    keepalive_s: Positive = 20.0
    """Seconds of silence after which a connection is probed."""


class ServeConfig(TargetSettings):
    """Settings of `moa-data serve`."""

    drafter: Common[tuple[str, ...]] = ()
    """Runs of `moa-data train`, or folders with drafters. Requests that name no drafter use the
    first one."""
    name: Common[str | None] = None
    """Name of the model in requests; default: the last part of --model."""
    host: Common[str] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all addresses of the machine."""
    port: Common[Port] = 8000
    """Port of HTTP; 0 for any free port."""
    grpc_port: Common[Port | None] = 8001
    """Port of gRPC, for `moa-data chat` and other clients that draft; 0 for any free port, none for
    no gRPC."""
    allowed_host: tuple[str, ...] = ()
    """Host names, besides localhost and addresses, by which web pages and proxies may address a
    server without tokens."""
    token_file: Common[str | None] = None
    """File of bearer tokens, one per line, which give access to the server. Default: everybody has
    access."""
    tls_cert: Common[str | None] = None
    """File of the server's certificate chain (PEM); with --tls-key."""
    tls_key: Common[str | None] = None
    """File of the certificate's private key (PEM)."""
    grace_s: NonNegative = 30.0
    """Seconds for running answers to end after Ctrl-C or SIGTERM."""
    engine: EngineOptions = Field(default_factory=EngineOptions)
    limits: LimitOptions = Field(default_factory=LimitOptions)
    drafting: DraftingOptions = Field(default_factory=DraftingOptions)

    @override
    def problems(self) -> list[str]:
        return (
            ["tls_cert and tls_key belong together"]
            if bool(self.tls_cert) != bool(self.tls_key)
            else []
        )

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """Files of the certificate chain and its key; None without TLS."""
        if not self.tls_cert or not self.tls_key:
            return None
        return Path(self.tls_cert).expanduser(), Path(self.tls_key).expanduser()
