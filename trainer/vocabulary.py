"""Choose the draft vocabulary of a run (the tokens that can be drafted) if it was not given.

See :mod:`..moa.drafters.vocabulary`.
"""

import dataclasses
from typing import Any

import torch

from ..moa.drafters.registry import drafter_class
from ..moa.drafters.vocabulary import choose_draft_vocabulary, may_be_reduced
from ..moa.targets.facts import load_facts
from .batches import BatchReader
from .config import AnyDrafter
from .data import StoreDataModule
from .defaults import ChosenSetting


def size_settings(drafter: AnyDrafter) -> dict[str, Any]:
    """Return the settings of a drafter that are also fields of its config, by name."""
    config_class = drafter_class(drafter.kind).config_class
    names = {item.name for item in dataclasses.fields(config_class)}
    sizes: dict[str, Any] = {}
    for name, value in drafter:
        if name in names:
            sizes[name] = value
    return sizes


def choose_vocabulary(data: StoreDataModule) -> None:
    """Choose the setting ``draft_vocabulary``, the number of tokens that can be drafted.

    The choice depends on the tokens in the training responses, and on the sizes of drafter and
    target. The setting is not changed if it was given, if the run is resumed, or if the target's
    vocabulary is small.
    """
    config = data.config
    store = data.store
    is_given = config.resume or config.drafter.draft_vocabulary is not None
    if is_given or not may_be_reduced(int(store.manifest.target["vocab_size"])):
        return
    facts = load_facts(store.target_path)
    build = drafter_class(config.drafter.kind)
    sizes = build.config_class.from_target(facts, **size_settings(config.drafter))
    with torch.device("meta"):
        width, n_body = build(sizes).weights_per_draft()
    reader = BatchReader(store, config, torch.device("cpu"))
    halves = torch.stack(
        [reader.count_response_tokens(data.train_sequences[half::2]) for half in (0, 1)]
    )
    max_tokens = sizes.draft_vocabulary or halves.shape[1]
    choice = choose_draft_vocabulary(halves, width, n_body, facts.n_weights, max_tokens)
    chosen = ChosenSetting("draft_vocabulary", choice.n_tokens or max_tokens, choice.why)
    data.config = config.replaced(draft_vocabulary=chosen.value)
    data.chosen = [*data.chosen, chosen]
