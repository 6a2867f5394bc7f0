"""EAGLE-3's list of tensors and its vocabulary map."""

from typing import Any

import pytest
import torch

from moa_data.errors import CheckpointError
from moa_data.moa.files.tensor_list import check_tensors, find_problems
from moa_data.moa.formats.eagle3 import ARCHITECTURE, check_vocabulary_map, eagle3_config, eagle3_tensors


def example() -> Any:
    """A file that fits."""
    tensors = eagle3_tensors(8, 2, 1, 4, 12, vocab_size=10, draft_vocab_size=3)
    weights = {name: torch.zeros(spec.shape, dtype=spec.dtypes[0]) for name, spec in tensors.items()}
    ids = torch.tensor([1, 4, 9])
    weights["d2t"] = ids - torch.arange(3)
    weights["t2d"][ids] = True
    return tensors, weights


def test_the_list_is_that_of_the_engines() -> None:
    tensors, weights = example()
    check_tensors(weights, tensors, "example")
    check_vocabulary_map(weights)
    assert len(tensors) == 15
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (8, 16)
    assert tensors["midlayer.self_attn.k_proj.weight"].shape == (4, 16)
    assert tensors["fc.weight"].shape == (8, 24)
    assert find_problems(weights | {"d2t": weights["d2t"].int()}, tensors) == ["d2t is int32, expected int64"]
    del weights["d2t"]
    with pytest.raises(CheckpointError, match="missing key d2t"):
        check_tensors(weights, tensors, "example")


@pytest.mark.parametrize(
    ("d2t", "marked", "message"),
    [
        ([1, 4, 9], [1, 4, 9], "names the tokens 1 to 11.* offsets"),
        ([1, 0, 7], [1, 9], "maps two draft ids to one token"),
        ([1, 3, 7], [1, 4, 8], "t2d marks 3 tokens"),
        ([1, 3, 7], [1, 4, 8, 9], "t2d marks 4 tokens, expected the 3"),
    ],
)
def test_a_wrong_map_is_named(d2t: list[int], marked: list[int], message: str) -> None:
    t2d = torch.zeros(10, dtype=torch.bool)
    t2d[marked] = True
    with pytest.raises(CheckpointError, match=message):
        check_vocabulary_map({"d2t": torch.tensor(d2t), "t2d": t2d})


def test_layers_are_told_to_each_engine_in_its_numbers() -> None:
    config = eagle3_config({"hidden_size": 8}, 3, (1, 3, 4), target_width=16)
    assert config["architectures"] == [ARCHITECTURE]
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 4]
    assert (config["draft_vocab_size"], config["target_hidden_size"], config["hidden_size"]) == (3, 16, 8)
