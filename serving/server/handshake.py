"""The handshake: whether client and server belong together, and what an Open asks the engine for."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import ProtocolMismatch, RequestInvalid
from ...moa.decoding.sampling import SamplingConfig
from ...moa.drafters.base import Drafter
from ..engine.sequence import Request
from ..protocol import moa_v1_pb2 as pb
from ..protocol.wire import PROTOCOL, check_codec


@dataclass(frozen=True)
class Identities:
    """What the server has, see ``protocol.wire``.

    Attributes:
        drafters: name in the engine -> identity; the first one drafts for clients that name none.
    """

    target: str = ""
    tokenizer: str = ""
    drafters: Mapping[str, str] = field(default_factory=dict)


def read_open(body: pb.Open, identities: Identities, drafters: Mapping[str, Drafter]) -> Request:
    """Turn an Open into a request for the engine.

    Args:
        drafters: those of the engine.

    Raises:
        ProtocolMismatch: client and server do not belong together.
        RequestInvalid: settings make no sense; likewise DrafterError.
    """
    if body.protocol != PROTOCOL:
        raise ProtocolMismatch(
            f"the client speaks protocol {body.protocol}, this server {PROTOCOL}; install the same release on both."
        )
    given = body.identities
    _compare("target", given.target, identities.target)
    _compare("tokenizer", given.tokenizer, identities.tokenizer)
    drafter, wants_context = next(iter(identities.drafters), None), False
    if body.codec:
        check_codec(body.codec)
        drafter = _drafter_of(given.drafter, identities.drafters)
        wants_context = drafters[drafter].context_width != 0
    sampling = SamplingConfig(
        body.sampling.temperature, body.sampling.top_p or 1.0, body.sampling.top_k,
        body.sampling.repetition_penalty or 1.0,
    )  # fmt: skip
    deadline_s = time.monotonic() + body.deadline_ms / 1000 if body.deadline_ms else None
    return Request(
        tuple(body.tokens), body.n_prompt, body.max_new_tokens, sampling, body.sampling.seed, deadline_s, drafter,
        wants_context, body.n_context,
    )  # fmt: skip


def _drafter_of(identity: str, drafters: Mapping[str, str]) -> str:
    """Find the drafter whose contexts a client wants, by default the first."""
    if not drafters:
        raise RequestInvalid("this server has no drafter, so it makes no contexts; open without a codec.")
    for name, own in drafters.items():
        if not identity or not own or own == identity:
            return name
    known = ", ".join(own[:12] for own in drafters.values())
    raise ProtocolMismatch(
        f"the client's drafter is {identity[:12]}, the server has {known}; use the same drafter on both sides."
    )


def _compare(what: str, given: str, own: str) -> None:
    if given and own and given != own:
        raise ProtocolMismatch(
            f"the client's {what} is {given[:12]}, the server's {own[:12]}; use the same {what} on both sides."
        )
