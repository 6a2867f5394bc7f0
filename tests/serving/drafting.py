"""A real gRPC server on a free port, and clients that send its messages one by one."""

import queue
from collections.abc import Iterator, Sequence
from typing import Any

import grpc

from moa_data.moa.targets.live import Target
from moa_data.serving import moa_v1_pb2 as pb
from moa_data.serving.grpc import Identities
from moa_data.serving.wire import CLIENT_OPTIONS
from moa_data.tests.kit.models import build_tokenizer
from moa_data.tests.kit.serving import LiveServer
from moa_data.tests.kit.templates import LLAMA3_TEMPLATE

METHOD = "/moa.v1.Drafting/Session"
PLAIN, SPECULATE = pb.RUN_MODE_PLAIN, pb.RUN_MODE_SPECULATE
WAIT_S = 60.0
"""Seconds after which a test gives up waiting for a message."""


class Server(LiveServer):
    """A server for tests of gRPC.

    Its target needs no tokenizer, and it does not wait for clients when it ends.
    """

    def __init__(
        self,
        target: Target,
        drafters: Any = None,
        identities: Identities | None = None,
        **settings: Any,
    ) -> None:
        target.tokenizer = target.tokenizer or build_tokenizer(LLAMA3_TEMPLATE)
        names = identities or Identities(drafters=dict.fromkeys(drafters or {}, ""))
        super().__init__(target, drafters, names, **{"grpc_port": 0, "grace_s": 0} | settings)

    @property
    def port(self) -> int:
        return int(self.grpc_address.rpartition(":")[2])

    @property
    def counts(self) -> Any:
        assert self.run.drafting is not None
        return self.run.drafting.counts


class Talk:
    """One stream. It keeps all messages in the order in which they arrive."""

    def __init__(self, address: str, metadata: Any = (), options: Any = ()) -> None:
        options = [("grpc.use_local_subchannel_pool", 1), *options, *CLIENT_OPTIONS]
        self.channel = grpc.insecure_channel(address, options)
        self._requests: queue.Queue[bytes | None] = queue.Queue()
        self.sequence, self.failure = 0, None
        self.got: list[pb.ServerMessage] = []
        call = self.channel.stream_stream(METHOD, response_deserializer=pb.ServerMessage.FromString)
        self.call: Any = call(
            iter(self._requests.get, None), metadata=metadata, timeout=WAIT_S, wait_for_ready=True
        )

    def send_bytes(self, data: bytes) -> None:
        self._requests.put(data)

    def send(self, sequence: int | None = None, **body: Any) -> int:
        """Send a message; return its sequence number."""
        self.sequence = self.sequence + 1 if sequence is None else sequence
        self.send_bytes(pb.ClientMessage(sequence=self.sequence, **body).SerializeToString())
        return self.sequence

    def open(self, tokens: Sequence[int], n_prompt: int | None = None, **settings: Any) -> None:
        settings = {"protocol": 1, "max_new_tokens": 12} | settings
        self.send(
            open=pb.Open(
                tokens=tokens, n_prompt=len(tokens) if n_prompt is None else n_prompt, **settings
            )
        )

    def opened(self, *arguments: Any, **settings: Any) -> pb.Opened:
        self.open(*arguments, **settings)
        return self.read("opened").opened

    def read(self, *kinds: str) -> pb.ServerMessage:
        """Return the next message of some kinds, or of any kind.

        Messages before it are kept in ``got`` too.
        """
        while True:
            message: pb.ServerMessage = next(self.call)
            self.got.append(message)
            if not kinds or message.WhichOneof("body") in kinds:
                return message

    def verify(self, start: int, tokens: Sequence[int] = ()) -> pb.Committed:
        """Ask for one target call, and return the answer."""
        sequence = self.send(verify=pb.Verify(start=start, tokens=tokens))
        while True:
            message = self.read("committed", "failure")
            assert message.WhichOneof("body") == "committed", message
            if message.committed.answers == sequence:
                return message.committed

    def rest(self) -> list[pb.ServerMessage]:
        """Read to the end of the stream; return all messages."""
        try:
            while True:
                self.read()
        except StopIteration:
            return self.got
        except grpc.RpcError as error:
            self.failure = error
            return self.got

    def status(self) -> Any:
        """Return the status with which the stream ends."""
        self.rest()
        return self.call.code()

    @property
    def text(self) -> dict[int, int]:
        """Position -> committed token. Messages must not contradict each other."""
        found: dict[int, int] = {}
        for committed in self.committed():
            for position, token in enumerate(committed.tokens, committed.start):
                assert found.setdefault(position, token) == token
        return found

    def committed(self) -> Iterator[pb.Committed]:
        return (
            message.committed for message in self.got if message.WhichOneof("body") == "committed"
        )

    def hang_up(self) -> None:
        """Send no more messages."""
        self._requests.put(None)

    def run(self, start: int, mode: Any = SPECULATE) -> list[int]:
        """Let the server decode to the end of the answer; return all committed tokens in order."""
        self.send(run=pb.Run(start=start, mode=mode))
        self.hang_up()
        self.rest()
        return self.answer

    @property
    def answer(self) -> list[int]:
        """All committed tokens, in the order of their positions."""
        return [token for _, token in sorted(self.text.items())]

    def cut(self) -> None:
        self.call.cancel()
        self._requests.put(None)
        self.channel.close()

    def __enter__(self) -> "Talk":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
