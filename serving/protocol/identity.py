"""What tells whether client and server mean the same target, tokenizer and drafter.

The hashes are those of :class:`Identities`; they don't depend on how a side loads its files.
"""

import hashlib
import json
from typing import Any

import torch

PROTOCOL = 1
"""Version of the protocol; both sides must have the same."""


def tokenizer_identity(tokenizer: Any) -> str:
    """Hash which token has which id, of a tokenizer of transformers; empty without one."""
    if tokenizer is None:
        return ""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()


@torch.no_grad()
def drafter_identity(drafter: Any) -> str:
    """Hash the sizes and weights of a loaded drafter.

    Weights are taken as bfloat16, so that one that was loaded in bfloat16 and one in float32 are the same.
    """
    digest = hashlib.sha256(json.dumps(drafter.config.to_dict(), sort_keys=True).encode())
    for name, weight in sorted(drafter.state_dict().items()):
        digest.update(f"{name} {list(weight.shape)}".encode())
        digest.update(weight.to("cpu", torch.bfloat16).contiguous().view(torch.uint8).flatten().numpy().tobytes())
    return digest.hexdigest()


def target_identity(hashes: dict[str, str]) -> str:
    """Pick the hash of a target's weights out of what ``Target.identity`` or ``drafter.json`` records of it."""
    return hashes.get("weights_sha256", "")
