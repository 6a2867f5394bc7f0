"""Settings of `moa-data serve`, which the engine and the servers use directly.

The command line imports this module to show its help. So this module does not import torch, which
takes long to load.
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
    """Size of the KV cache (memory for keys and values) in tokens, for all sequences together. A
    prompt with its answer cannot be longer than this. If the cache is full, sequences that do
    nothing at the moment are removed from it first; they are prefilled again when they continue,
    which takes time. A larger cache takes more memory."""
    max_sequences: Count = 32
    """Maximum number of sequences that one target call (forward pass of the target) processes. A
    higher value serves more requests at the same time, but makes each of them slower."""
    max_waiting: Count = 256
    """Maximum number of sequences that wait because `max_sequences` others are being processed.
    Further requests are refused with the HTTP error 503."""
    prefill_chunk: Count = 256
    """Maximum number of prompt tokens that one target call (forward pass of the target) processes,
    for all sequences together. A higher value reads prompts faster; a lower value delays the
    running answers less."""
    max_drafts: Count = 64
    """Maximum number of drafts that the server verifies in one target call for a client that drafts
    itself, such as `moa-data chat`."""
    tree: str = "auto"
    """How many tokens the server drafts per target call. 5: a chain of five drafts.
    LENGTH@PROBABILITY, such as 10@0.2: a chain of at most ten drafts, which ends when the
    probability that all of them are accepted falls below 0.2 (an estimate of the drafter).
    DEPTHxBREADTHxNODES, such as 6x8x62: a tree with six levels, in which the eight most likely
    nodes of each level get eight children each, and the 62 most likely nodes of all levels are
    verified. auto: 10@0.2, but no drafts while they would make decoding slower."""
    target_ms: NonNegative = 0.0
    """Minimum duration of a target call (forward pass of the target) in milliseconds. Use it in
    experiments, to imitate a slower target. 0 adds no delay."""

    @property
    def shape(self) -> "TreeShape | None":
        """The shape of the drafts that the server itself makes. None for ``auto``.

        Raises:
            DrafterError: ``tree`` is not a shape.
        """
        from ..moa.decoding.tree import TreeShape  # Import here, because this import loads torch.

        return None if self.tree == "auto" else TreeShape.parse(self.tree)

    @override
    def problems(self) -> list[str]:
        return self.refusal_of(lambda: self.shape)


class LimitOptions(Config):
    """Limits on connections, and on the requests of one client."""

    max_body_bytes: Count = 1 << 20
    """Maximum size in bytes of the body of an HTTP request or of a gRPC message. Larger ones are
    refused."""
    body_s: Positive = 30.0
    """Maximum time in seconds for the body of a request to arrive. A slower request is refused with
    the HTTP error 408."""
    answer_s: NonNegative = 600.0
    """Maximum duration of an answer in seconds. An answer that takes longer is cut off. 0 sets no
    limit."""
    max_new_tokens: Count = 4096
    """Maximum length in tokens of an answer over HTTP. A request for a longer answer is refused."""
    requests_per_s: NonNegative = 0.0
    """Maximum number of requests per second of one client. Further requests are refused with the
    HTTP error 429. A client is identified by its bearer token, or by its IP address if the server
    has no tokens. 0 sets no limit."""
    requests_at_once: Count = 32
    """Only with `requests_per_s`: number of requests that a client may send at once after a pause.
    It may be higher than `requests_per_s`."""
    max_connections: Count = 1024
    """Maximum number of open connections. If there are more, the connection that has been without a
    request for the longest time is closed. If all connections are busy with requests, the new
    connection gets the HTTP error 503."""
    max_connections_each: Count = 256
    """Maximum number of open connections from one IP address. If there are more, the connection
    from this address that has been without a request for the longest time is closed. If all of them
    are busy with requests, the new connection gets the HTTP error 503. All clients behind a proxy
    share one address."""
    head_s: Positive = 15.0
    """Maximum time in seconds for the header of a request to arrive, or for a gRPC stream to open
    its session. A TLS handshake is included. Slower connections are closed."""
    write_s: Positive = 30.0
    """Maximum time in seconds for a client to read the next piece of its answer. A slower client is
    disconnected."""


class DraftingOptions(Config):
    """Limits of the gRPC server, whose clients draft themselves."""

    max_sessions: Count = 256
    """Maximum number of sessions of all clients together. A session is one answer for which the
    client makes the drafts, as with `moa-data chat`. It also counts while its client is
    disconnected. If there are more, a session that is not in use is removed; if all are in use, the
    new session is refused."""
    max_sessions_each: Count = 64
    """Maximum number of sessions of one client. A session is one answer for which the client makes
    the drafts, as with `moa-data chat`. A client is identified by its bearer token, or by its IP
    address if the server has no tokens."""
    messages_per_s: Positive = 200.0
    """Maximum number of messages per second in one session. A session is one answer for which the
    client makes the drafts, as with `moa-data chat`. The server delays further messages."""
    idle_s: Positive = 600.0
    """Time in seconds without messages after which a session is removed. A session is one answer
    for which the client makes the drafts, as with `moa-data chat`. If its client continues later,
    the server prefills the text again."""
    keepalive_s: Positive = 20.0
    """Time in seconds without traffic after which the server checks whether a gRPC connection still
    works. With a lower value, the server notices lost clients sooner."""


class ServeConfig(TargetSettings):
    """Settings of `moa-data serve`."""

    drafter: Common[tuple[str, ...]] = ()
    """Drafters that the server can use, separated by commas. Each is a run of `moa-data train`, or
    a folder with a drafter. The first one drafts for requests that name no drafter. Default:
    none."""
    name: Common[str | None] = None
    """Name of the model, which requests must give. Default: the last part of `model`."""
    host: Common[str] = "127.0.0.1"
    """IP address on which the server listens. With 127.0.0.1, only programs on the same machine can
    reach the server. 0.0.0.0 means all addresses of the machine."""
    port: Common[Port] = 8000
    """Port of the HTTP server. 0 takes any free port."""
    grpc_port: Common[Port | None] = 8001
    """Port of the gRPC server for clients that draft themselves, such as `moa-data chat`. 0 takes
    any free port. With the value none, no gRPC server is started."""
    allowed_host: tuple[str, ...] = ()
    """Only without `token_file`: further host names, separated by commas, under which web pages and
    proxies may reach the server. localhost and IP addresses are always allowed."""
    token_file: Common[str | None] = None
    """File with bearer tokens, one per line. Only clients that send one of them have access.
    Default: all clients have access."""
    tls_cert: Common[str | None] = None
    """File with the server's TLS certificate chain (PEM). Also give `tls_key`. Default: no TLS."""
    tls_key: Common[str | None] = None
    """File with the private key (PEM) of the certificate in `tls_cert`."""
    grace_s: NonNegative = 30.0
    """Time in seconds that running answers have to finish after Ctrl-C or SIGTERM. Answers that
    take longer are cut off."""
    engine: EngineOptions = Field(default_factory=EngineOptions)
    limits: LimitOptions = Field(default_factory=LimitOptions)
    drafting: DraftingOptions = Field(default_factory=DraftingOptions)

    @override
    def problems(self) -> list[str]:
        return (
            [
                (
                    "`tls_cert` and `tls_key` must be given together, because TLS needs both a "
                    "certificate and its key"
                )
            ]
            if bool(self.tls_cert) != bool(self.tls_key)
            else []
        )

    @property
    def tls(self) -> tuple[Path, Path] | None:
        """The paths of the TLS certificate chain and of its private key, or None without TLS."""
        if not self.tls_cert or not self.tls_key:
            return None
        return Path(self.tls_cert).expanduser(), Path(self.tls_key).expanduser()
