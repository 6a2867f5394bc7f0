"""A micro-batch may have no loss position, whatever the drafter: it adds nothing to loss and gradients."""

from collections.abc import Callable

import pytest
import torch

from moa_data.moa.drafters.base import Drafter
from moa_data.moa.drafters.rounds import Draws
from moa_data.moa.drafters.training import TrainingInputs
from moa_data.moa.nn import kv as kv_layout
from moa_data.moa.target.bundle import FrozenTarget
from moa_data.moa.target.live import layer_outputs
from moa_data.tests.kit.drafters import build_drafter
from moa_data.tests.kit.models import build_model

from .test_eagle import build_eagle
from .test_eagle3 import build_eagle3
from .test_glide import build_glide
from .test_independent import build_independent
from .test_medusa import build_medusa

BUILDERS: list[Callable[..., Drafter]] = [
    build_drafter, build_eagle, build_eagle3, build_glide, build_independent, build_medusa,
]  # fmt: skip


@pytest.mark.parametrize(
    ("build", "response"),
    [(build, []) for build in BUILDERS]
    + [(build, [0]) for build in BUILDERS if build is not build_independent]
    + [(build_drafter, [8])],
)
def test_a_batch_without_a_loss_position_adds_nothing(build: Callable[..., Drafter], response: list[int]) -> None:
    """No round of this bound and offset drafts positions 8 and 0 of an MoA; other drafters see nothing before 0."""
    model = build_model()
    drafter, frozen, tokens = build(model), FrozenTarget.from_model(model), torch.randint(4, 60, (1, 12))
    cache = kv_layout.new_cache()
    with torch.no_grad(), layer_outputs(model, (0, 1)) as outputs:
        hidden = model.model(tokens, past_key_values=cache, use_cache=True).last_hidden_state
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    mask[0, response] = True
    inputs = TrainingInputs(tokens, mask, kv_layout.cache_kv(cache, 0, 12), hidden, None, (outputs[0], outputs[1]))
    draws = Draws(torch.tensor([5]), torch.zeros(1, dtype=torch.bool), torch.tensor([3 if response == [8] else 0]))
    terms = drafter.objective(frozen, inputs, draws)
    assert terms.n_positions == int(drafter.loss_positions(mask, draws, official=False).sum()) == 0
    terms.total.backward()
    assert terms.total.item() == terms.forward_kl.item() == 0.0
    assert all(weight.grad is None or not weight.grad.any() for weight in drafter.parameters())
    assert not drafter.drafted_features(frozen, inputs, draws).valid.any()
