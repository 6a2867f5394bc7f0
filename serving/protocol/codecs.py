"""Codecs of drafter contexts: what the numbers of n positions are on the wire.

A lossy codec changes how often drafts are accepted, never the text. Numbers are little-endian, positions follow each
other, and each is coded on its own, so that a message may hold any number of them. One position of 100 numbers::

    bf16    100 x 2 bytes                                                            200 bytes
    int8    2 scales x 2 bytes, then 100 x 1 byte                                    104 bytes
    int4    2 scales x 2 bytes, then 50 bytes, the first number in the lower bits     54 bytes

A scale is the bfloat16 of a group's largest magnitude over 127 or 7; a group is 64 numbers, the last one what is left.
One scale a position would not do: some numbers, keys above all, are many times larger than the others, which would all
be rounded to 0. Infinities and NaN are sent as 0, for either would spoil all drafts behind it.

Shapes: n positions, W numbers of a position, G groups.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import RequestInvalid, ServingError

CODECS = ("bf16", "int8", "int4")
"""Names, from the most exact to the smallest."""
GROUP = 64
_MOST = {"int8": 127, "int4": 7}
"""Largest code of each codec of integers; the smallest is its negative."""
_LARGEST = torch.finfo(torch.bfloat16).max


def check_codec(codec: str) -> None:
    """Refuse a name that is not of :data:`CODECS`.

    Raises:
        RequestInvalid: it isn't.
    """
    if codec not in CODECS:
        raise RequestInvalid(f"there is no codec {codec[:20]!r} of contexts; expected one of {', '.join(CODECS)}.")


def bytes_per_position(codec: str, width: int) -> int:
    """Count the bytes of a position of W numbers."""
    check_codec(codec)
    if codec == "bf16":
        return 2 * width
    return 2 * -(-width // GROUP) + (width if codec == "int8" else -(-width // 2))


def encode(codec: str, context: Tensor) -> bytes:
    """Encode contexts [n, W] of any floating dtype; :func:`bytes_per_position` says how many bytes come."""
    check_codec(codec)
    if not context.numel():
        return b""
    values = context.detach().to("cpu", torch.float32)
    values = torch.where(values.isfinite(), values, 0.0).clamp(-_LARGEST, _LARGEST)
    if codec == "bf16":
        return _as_bytes(values.to(torch.bfloat16))
    width = values.shape[1]
    groups = F.pad(values, (0, -width % GROUP)).unflatten(1, (-1, GROUP))  # [n, G, 64]
    scales = (groups.abs().amax(dim=2) / _MOST[codec]).to(torch.bfloat16)  # [n, G]
    steps = scales.float()[..., None]
    codes = torch.where(steps > 0, groups / steps, 0.0).round().clamp(-_MOST[codec], _MOST[codec])
    codes = codes.to(torch.int8).flatten(1)[:, :width]
    if codec == "int4":
        pairs = F.pad(codes + 8, (0, width % 2)).to(torch.uint8).unflatten(1, (-1, 2))
        codes = pairs[..., 0] | pairs[..., 1] << 4
    parts = (scales.view(torch.uint8), codes.view(torch.uint8))
    return _as_bytes(torch.cat(parts, dim=1))


def decode(codec: str, values: bytes, n_positions: int, width: int) -> Tensor:
    """Decode contexts of n positions: [n, W] float32, finite whatever the bytes.

    Raises:
        ServingError: the bytes are too few or too many.
    """
    size = bytes_per_position(codec, width)
    if len(values) != n_positions * size:
        raise ServingError(
            f"contexts of {n_positions} positions are {n_positions * size} bytes in {codec}, got {len(values)}; "
            "do both sides have the same drafter?"
        )
    if not values:
        return torch.zeros(n_positions, width)
    found = torch.frombuffer(bytearray(values), dtype=torch.uint8).view(n_positions, size)
    if codec == "bf16":
        return _finite(found.view(torch.bfloat16))
    n_groups = -(-width // GROUP)
    scales = _finite(found[:, : 2 * n_groups].reshape(-1).view(torch.bfloat16)).view(n_positions, n_groups)
    codes = found[:, 2 * n_groups :]
    if codec == "int4":
        codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, :width].to(torch.int8) - 8
    else:
        codes = codes.view(torch.int8)
    return (codes * scales.repeat_interleave(GROUP, dim=1)[:, :width]).nan_to_num()


def _as_bytes(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


def _finite(values: Tensor) -> Tensor:
    """Return values as float32 with 0 for infinities and NaN."""
    return values.float().nan_to_num(0.0, 0.0, 0.0)
