"""Settings of `moa-data serve`; engine and servers take them as they are.

No torch here: the command line reads them for its help.
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
    """Bounds of the engine."""

    kv_tokens: Count = 16384
    """Positions whose keys and values are kept, of all texts together. Texts without work lose theirs first and are
    read again when they continue."""
    max_sequences: Count = 32
    """Texts that share a target call."""
    max_waiting: Count = 256
    """Open texts beyond those; a further one is refused as overloaded."""
    prefill_chunk: Count = 256
    """Tokens of prompts that a target call reads, of all texts together: more is faster, less delays others less."""
    max_drafts: Count = 64
    """Drafts of a client that one target call verifies."""
    tree: str = "auto"
    """Shape of the server's own drafts: a chain's length such as 5, LENGTH@PROBABILITY, DEPTHxBREADTHxNODES;
    or auto: 10@0.2, and plain steps while drafts do not pay."""
    target_ms: NonNegative = 0.0
    """Let each target call take at least so many milliseconds, to stand for a slower target."""

    @property
    def shape(self) -> "TreeShape | None":
        """The shape of the server's own drafts; None for auto. Raises DrafterError if ``tree`` is not a shape."""
        from ..moa.decoding.tree import TreeShape  # imports torch

        return None if self.tree == "auto" else TreeShape.parse(self.tree)

    @override
    def problems(self) -> list[str]:
        return self.refusal_of(lambda: self.shape)


class LimitOptions(Config):
    """Bounds on connections, and on what one client may ask for."""

    max_body_bytes: Count = 1 << 20
    """Bytes of a request, or of a message of gRPC."""
    body_s: Positive = 30.0
    """Seconds in which a request's body has to arrive."""
    answer_s: NonNegative = 600.0
    """Seconds after which an answer ends, complete or not; 0 for no end."""
    max_new_tokens: Count = 4096
    """Tokens of an answer."""
    requests_per_s: NonNegative = 0.0
    """Requests of one token or, without tokens, one address; 0 for any number."""
    requests_at_once: Count = 32
    """Requests that may come together after a rest."""
    max_connections: Count = 1024
    """Open connections. A further one takes the place of the one that has waited longest for a request; where all are
    being answered, it gets 503."""
    max_connections_each: Count = 256
    """Open connections of one address, likewise. A proxy in front has one address for all."""
    head_s: Positive = 15.0
    """Seconds in which the head of a request has to arrive, or a stream of gRPC to open its session; a TLS handshake
    included."""
    write_s: Positive = 30.0
    """Seconds in which a reader has to take the next part of its answer."""


class DraftingOptions(Config):
    """Bounds of the gRPC server, whose clients draft for themselves."""

    max_sessions: Count = 256
    """Drafting sessions of all clients, connected or not."""
    max_sessions_each: Count = 64
    """Sessions of one bearer token or, without tokens, one address."""
    messages_per_s: Positive = 200.0
    """Messages of one session; more are read later."""
    idle_s: Positive = 600.0
    """Seconds after which a session of which nothing was heard is forgotten."""
    keepalive_s: Positive = 20.0
    """Seconds of silence after which a connection is tried."""


class ServeConfig(TargetSettings):
    """Settings of `moa-data serve`."""

    drafter: Common[tuple[str, ...]] = ()
    """Runs of `moa-data train`, or folders with drafters; requests use the first one unless they name another."""
    name: Common[str | None] = None
    """Name of the model in requests; default: the last part of --model."""
    host: Common[str] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all of the machine's."""
    port: Common[Port] = 8000
    """Port of HTTP; 0 for any that is free."""
    grpc_port: Common[Port | None] = 8001
    """Port of gRPC, for `moa-data chat` and other clients that draft; 0 for any that is free, none for no gRPC."""
    allowed_host: tuple[str, ...] = ()
    """Names, besides localhost and addresses, by which web pages and proxies may address a server without tokens."""
    token_file: Common[str | None] = None
    """File of bearer tokens, one a line; those who have one may use the server. Default: everybody may."""
    tls_cert: Common[str | None] = None
    """File of the server's certificate chain (PEM); with --tls-key."""
    tls_key: Common[str | None] = None
    """File of its private key (PEM)."""
    grace_s: NonNegative = 30.0
    """Seconds that answers have to end after Ctrl-C or SIGTERM."""
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
        """Files of the certificate chain and of its key; None for no TLS."""
        if not self.tls_cert or not self.tls_key:
            return None
        return Path(self.tls_cert).expanduser(), Path(self.tls_key).expanduser()
