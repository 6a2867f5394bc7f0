from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RunMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUN_MODE_UNSPECIFIED: _ClassVar[RunMode]
    RUN_MODE_PLAIN: _ClassVar[RunMode]
    RUN_MODE_SPECULATE: _ClassVar[RunMode]
RUN_MODE_UNSPECIFIED: RunMode
RUN_MODE_PLAIN: RunMode
RUN_MODE_SPECULATE: RunMode

class ClientMessage(_message.Message):
    __slots__ = ("sequence", "open", "run", "verify", "close", "ping")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    CLOSE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    open: Open
    run: Run
    verify: Verify
    close: Close
    ping: Ping
    def __init__(self, sequence: _Optional[int] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., run: _Optional[_Union[Run, _Mapping]] = ..., verify: _Optional[_Union[Verify, _Mapping]] = ..., close: _Optional[_Union[Close, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("opened", "committed", "context", "pong", "failure")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    opened: Opened
    committed: Committed
    context: Context
    pong: Pong
    failure: Failure
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., context: _Optional[_Union[Context, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("protocol", "session", "identities", "tokens", "n_prompt", "sampling", "max_new_tokens", "codec", "n_context")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    N_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    session: str
    identities: Identities
    tokens: _containers.RepeatedScalarFieldContainer[int]
    n_prompt: int
    sampling: Sampling
    max_new_tokens: int
    codec: str
    n_context: int
    def __init__(self, protocol: _Optional[int] = ..., session: _Optional[str] = ..., identities: _Optional[_Union[Identities, _Mapping]] = ..., tokens: _Optional[_Iterable[int]] = ..., n_prompt: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., codec: _Optional[str] = ..., n_context: _Optional[int] = ...) -> None: ...

class Identities(_message.Message):
    __slots__ = ("target", "tokenizer", "drafter")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    target: str
    tokenizer: str
    drafter: str
    def __init__(self, target: _Optional[str] = ..., tokenizer: _Optional[str] = ..., drafter: _Optional[str] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "repetition_penalty", "seed")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    seed: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ...) -> None: ...

class Run(_message.Message):
    __slots__ = ("start", "mode")
    START_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    start: int
    mode: RunMode
    def __init__(self, start: _Optional[int] = ..., mode: _Optional[_Union[RunMode, str]] = ...) -> None: ...

class Verify(_message.Message):
    __slots__ = ("start", "tokens")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Close(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Ping(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("session", "n_committed", "identities", "context_width", "max_drafts", "max_positions", "was_rebuilt")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    N_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    IDENTITIES_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_WIDTH_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MAX_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    WAS_REBUILT_FIELD_NUMBER: _ClassVar[int]
    session: str
    n_committed: int
    identities: Identities
    context_width: int
    max_drafts: int
    max_positions: int
    was_rebuilt: bool
    def __init__(self, session: _Optional[str] = ..., n_committed: _Optional[int] = ..., identities: _Optional[_Union[Identities, _Mapping]] = ..., context_width: _Optional[int] = ..., max_drafts: _Optional[int] = ..., max_positions: _Optional[int] = ..., was_rebuilt: _Optional[bool] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ("start", "tokens", "n_accepted", "answers", "finish", "call_us", "queue_us")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    N_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CALL_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    start: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    n_accepted: int
    answers: int
    finish: str
    call_us: int
    queue_us: int
    def __init__(self, start: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., n_accepted: _Optional[int] = ..., answers: _Optional[int] = ..., finish: _Optional[str] = ..., call_us: _Optional[int] = ..., queue_us: _Optional[int] = ...) -> None: ...

class Context(_message.Message):
    __slots__ = ("start", "n_positions", "codec", "values")
    START_FIELD_NUMBER: _ClassVar[int]
    N_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    start: int
    n_positions: int
    codec: str
    values: bytes
    def __init__(self, start: _Optional[int] = ..., n_positions: _Optional[int] = ..., codec: _Optional[str] = ..., values: _Optional[bytes] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("code", "message", "ends", "answers")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    ends: bool
    answers: int
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ..., ends: _Optional[bool] = ..., answers: _Optional[int] = ...) -> None: ...
