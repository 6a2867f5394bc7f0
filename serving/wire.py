"""Code for client and server of ``moa.v1``: codecs of contexts, identities, channel options.

A *context* is the data that a client's drafter reads about one position that the target has
processed. It consists of W numbers. A codec defines how the contexts of n positions are encoded in
messages. A lossy codec changes how often drafts are accepted, never the text. Numbers are
little-endian. Each position is encoded independently, so a message may contain any number of
positions. For W = 100, the encoding of one position is::

    bf16    100 x 2 bytes                                                            200 bytes
    int8    2 scales x 2 bytes, then 100 x 1 byte                                    104 bytes
    int4    2 scales x 2 bytes, then 50 bytes, the first number in the lower bits     54 bytes

The integer codecs have one scale for each group of 64 numbers. The last group of a position may be
smaller. The scale is the largest magnitude of the group divided by 127 (int8) or 7 (int4), as
bfloat16.

Shapes: n positions, W numbers of a position, G groups.
"""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from grpc import StatusCode
from torch import Tensor

from ..errors import NotAllowed, Overloaded, ProtocolMismatch, RequestInvalid, ServingError

PROTOCOL = 1  # Version of the protocol. Client and server must have the same version.
CODECS = ("bf16", "int8", "int4")  # Codecs, from the most exact to the smallest.
ERRORS: dict[str, type[ServingError]] = {
    "overloaded": Overloaded, "invalid": RequestInvalid, "not_allowed": NotAllowed,
    "mismatch": ProtocolMismatch,
}  # fmt: skip
"""Code of a Failure message -> error class. After any other code, a new connection may help."""
STATUSES = {
    "overloaded": StatusCode.RESOURCE_EXHAUSTED, "invalid": StatusCode.INVALID_ARGUMENT,
    "not_allowed": StatusCode.UNAUTHENTICATED, "mismatch": StatusCode.FAILED_PRECONDITION,
    "unavailable": StatusCode.UNAVAILABLE, "idle": StatusCode.DEADLINE_EXCEEDED,
    "internal": StatusCode.INTERNAL,
}  # fmt: skip
"""Code of a Failure message that ends a stream -> gRPC status of the stream."""

# gRPC's window limits how many bytes the server may send before the client has read them. By
# default, gRPC enlarges the window until the network is full. On a slow network, tokens that are
# sent after the contexts of a prompt would then arrive seconds later. So the window has a fixed
# size. On a network with 20 Mbit/s and a round trip of 42 ms, this reduces the time until an answer
# arrives from 145 to 60 ms. In return, the contexts of a prompt take 1.4 s instead of 0.7 s.
CLIENT_OPTIONS = (("grpc.http2.lookahead_bytes", 1 << 16), ("grpc.http2.bdp_probe", 0))
"""Options of a client's connection: a fixed window of 64 kB."""

# Each group of this many neighbouring numbers of a context has its own scale. Some numbers of a
# context (especially attention keys) are many times larger than the rest. With a single scale for
# the whole context, the rest would be rounded to 0.
GROUP = 64
# Integer codec -> the largest integer that it stores for a number. The smallest integer is the same
# with a minus sign.
_MAX_CODE = {"int8": 127, "int4": 7}
_LARGEST = torch.finfo(torch.bfloat16).max


def check_codec(codec: str) -> None:
    """Raise RequestInvalid for a name that is not in :data:`CODECS`."""
    if codec not in CODECS:
        raise RequestInvalid(
            f"{codec[:20]!r} is not a codec for contexts (the activations that the server sends); "
            f"expected one of {', '.join(CODECS)}."
        )


def bytes_per_position(codec: str, width: int) -> int:
    """Return the number of bytes of an encoded position that has ``width`` numbers."""
    check_codec(codec)
    if codec == "bf16":
        return 2 * width
    return 2 * -(-width // GROUP) + (width if codec == "int8" else -(-width // 2))


def encode(codec: str, context: Tensor) -> bytes:
    """Encode the contexts [n, W] (data for a drafter) of n positions, in any floating dtype."""
    check_codec(codec)
    if not context.numel():
        return b""
    values = context.detach().to("cpu", torch.float32)
    # Infinity and NaN are sent as 0. Otherwise a single such number would spoil all later drafts.
    values = torch.where(values.isfinite(), values, 0.0).clamp(-_LARGEST, _LARGEST)
    if codec == "bf16":
        return _as_bytes(values.to(torch.bfloat16))
    width = values.shape[1]
    groups = F.pad(values, (0, -width % GROUP)).unflatten(1, (-1, GROUP))
    # There is one scale per group of 64 values. The shape of ``scales`` is [n, G].
    scales = (groups.abs().amax(dim=2) / _MAX_CODE[codec]).to(torch.bfloat16)
    steps = scales.float()[..., None]
    codes = (
        torch.where(steps > 0, groups / steps, 0.0)
        .round()
        .clamp(-_MAX_CODE[codec], _MAX_CODE[codec])
    )
    codes = codes.to(torch.int8).flatten(1)[:, :width]
    if codec == "int4":
        pairs = F.pad(codes + 8, (0, width % 2)).to(torch.uint8).unflatten(1, (-1, 2))
        codes = pairs[..., 0] | pairs[..., 1] << 4
    return _as_bytes(torch.cat((scales.view(torch.uint8), codes.view(torch.uint8)), dim=1))


def decode(codec: str, values: bytes, n_positions: int, width: int) -> Tensor:
    """Decode the contexts (data for a drafter) of n positions: [n, W] float32, all finite.

    Raises:
        ServingError: the number of bytes is wrong.
    """
    size = bytes_per_position(codec, width)
    if len(values) != n_positions * size:
        raise ServingError(
            f"contexts (activations for the drafter) of {n_positions} positions have "
            f"{n_positions * size} bytes with the codec {codec}, but {len(values)} bytes arrived; "
            "use the same drafter on client and server."
        )
    if not values:
        return torch.zeros(n_positions, width)
    packed = torch.frombuffer(bytearray(values), dtype=torch.uint8).view(n_positions, size)
    if codec == "bf16":
        return _finite(packed.view(torch.bfloat16))
    n_groups = -(-width // GROUP)
    scales = _finite(packed[:, : 2 * n_groups].reshape(-1).view(torch.bfloat16)).view(
        n_positions, n_groups
    )
    codes = packed[:, 2 * n_groups :]
    if codec == "int4":
        codes = (
            torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, :width].to(torch.int8) - 8
        )
    else:
        codes = codes.view(torch.int8)
    return (codes * scales.repeat_interleave(GROUP, dim=1)[:, :width]).nan_to_num()


def _as_bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def _finite(values: Tensor) -> Tensor:
    return values.float().nan_to_num(0.0, 0.0, 0.0)


# An identity is a hash by which client and server check that they have the same target, tokenizer
# or drafter. The hash does not depend on how each side loads its files.


def target_identity(hashes: dict[str, str]) -> str:
    """Return the hash of a target's weights.

    ``hashes`` is ``Target.identity``, or the hashes of the target in a drafter's config.
    """
    return hashes.get("weights_sha256", "")


def tokenizer_identity(tokenizer: Any) -> str:
    """Hash the vocabulary of a transformers tokenizer. Empty if the tokenizer is None."""
    if tokenizer is None:
        return ""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


@torch.no_grad()
def drafter_identity(drafter: Any) -> str:
    """Hash the sizes and weights of a loaded drafter."""
    # Hash the weights as bfloat16, so that a drafter has the same hash whether it was loaded in
    # bfloat16 or float32.
    digest = hashlib.sha256(json.dumps(drafter.config.to_dict(), sort_keys=True).encode())
    for name, weight in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(_as_bytes(weight.to("cpu", torch.bfloat16)))
    return digest.hexdigest()


def n_common(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the number of leading items that two sequences have in common."""
    n_shorter = min(len(first), len(second))
    for n in range(n_shorter):
        if first[n] != second[n]:
            return n
    return n_shorter
