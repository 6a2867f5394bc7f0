"""Identities are those of what is loaded, not of how."""

import torch

from moa_data.serving.protocol.wire import drafter_identity, target_identity, tokenizer_identity
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_byte_tokenizer, build_model, build_tokenizer


def test_drafters() -> None:
    model = build_model()
    one = drafter_identity(build_drafter(model))
    assert one == drafter_identity(build_drafter(model))
    assert one == drafter_identity(build_drafter(model).bfloat16()), "in whatever dtype it was loaded"
    assert one != drafter_identity(build_drafter(model, seed=2))
    assert one != drafter_identity(build_drafter(model, unrotated_keys=True)), "sizes count"
    changed = build_drafter(model)
    with torch.no_grad():
        changed.kv_to_hidden.bias[3] += 1
    assert one != drafter_identity(changed)


def test_tokenizers() -> None:
    one = tokenizer_identity(build_tokenizer(None))
    assert one == tokenizer_identity(build_tokenizer("{{ messages }}")), "the template is the client's affair"
    assert one != tokenizer_identity(build_byte_tokenizer())
    assert tokenizer_identity(None) == ""


def test_targets() -> None:
    assert target_identity({"weights_sha256": "ab", "config_sha256": "cd"}) == "ab"
    assert target_identity({}) == ""
