"""Compare speculators' training batches read from its own files and from a store.

Both use speculators' own dataset and collation. Its Python runs this script.
"""

import argparse
import pickle
import sys
from pathlib import Path

import torch
from hs_connectors import FileTransfer, HiddenStatesBackend
from speculators.train.data import ArrowDataset, CollateFn

from moa_data.pipeline.exchange import speculators_backend  # noqa: F401  # registers moa

rows, store, files, most = sys.argv[1:]
backend = HiddenStatesBackend.registry["moa"]
parser = argparse.ArgumentParser()
backend.add_train_args(parser)
ours = backend.from_train_args(parser.parse_args(["--moa-store", store]), rows)
# A data loader worker receives a pickled copy.
ours = pickle.loads(pickle.dumps(ours))
assert ours.get_cached(10**6) is None
sides = [
    ArrowDataset(512, rows, transfer, on_missing="raise", train_ratio=0.8, split=split)
    for transfer in (FileTransfer(Path(files) / "hidden_states"), ours)
    for split in ("train", "val")
]
collate = CollateFn(512, 48)
n, error = 0, 0.0
for theirs, own in (sides[::2], sides[1::2]):
    for first in range(0, len(theirs), 3):
        picked = range(first, min(first + 3, len(theirs)))
        one, two = (collate([side[i] for i in picked]) for side in (theirs, own))
        assert one.keys() == two.keys()
        for name, value in one.items():
            if not isinstance(value, torch.Tensor):
                assert value == two[name], name
                continue
            assert (value.dtype, value.shape) == (two[name].dtype, two[name].shape), name
            if "hidden" not in name or float(most) == 0:
                assert torch.equal(value, two[name]), name
            else:
                error = max(
                    error, float((value.float() - two[name].float()).norm() / value.float().norm())
                )
        n += len(picked)
assert error <= float(most), error
sys.stdout.write(f"{n}\n")
