"""Choose the draft vocabulary of a run (the tokens that can be drafted) if it was not given.

See :mod:`..moa.drafters.vocabulary`.
"""

import numpy as np
import torch

from ..moa.drafters.registry import drafter_class
from ..moa.drafters.vocabulary import choose_draft_vocabulary, may_be_reduced
from ..moa.targets.facts import load_facts
from ..storage.read.store import ActivationStore
from .batches import drafter_sizes
from .data import StoreDataModule
from .defaults import ChosenSetting

# Number of sequences that are read at once to count their tokens.
_COUNTED_SEQUENCES = 256
# Maximum number of sequences whose tokens are counted. If there are more sequences, evenly spaced
# ones are chosen.
_MOST_COUNTED = 1 << 16


def count_response_tokens(store: ActivationStore, sequences: np.ndarray) -> torch.Tensor:
    """Count how often each token id occurs in the responses of the given sequences.

    If there are more than ``_MOST_COUNTED`` sequences, only the tokens of evenly spaced sequences
    are counted.

    Returns:
        The count of each token id, int64 [vocabulary size].
    """
    counts = np.zeros(int(store.manifest.target["vocab_size"]), np.int64)
    sequences = sequences[:: 1 + len(sequences) // _MOST_COUNTED]
    # Read few sequences at a time, because all tokens of a large store may not fit into memory.
    for part in np.array_split(sequences, -(-len(sequences) // _COUNTED_SEQUENCES) or 1):
        read = store.read_batch(part, ["tokens", "response_mask"])
        counts += np.bincount(read["tokens"][read["response_mask"] != 0], minlength=len(counts))
    return torch.from_numpy(counts)


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
    sizes = drafter_sizes(facts, config.drafter)
    with torch.device("meta"):
        width, n_body = drafter_class(sizes.kind)(sizes).weights_per_draft()
    halves = torch.stack(
        [count_response_tokens(store, data.train_sequences[half::2]) for half in (0, 1)]
    )
    max_tokens = sizes.draft_vocabulary or halves.shape[1]
    choice = choose_draft_vocabulary(halves, width, n_body, facts.n_weights, max_tokens)
    chosen = ChosenSetting("draft_vocabulary", choice.n_tokens or max_tokens, choice.why)
    data.config = config.replaced(draft_vocabulary=chosen.value)
    data.chosen = [*data.chosen, chosen]
