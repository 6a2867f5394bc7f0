"""Several devices give the results of one.

The loss of each step, the validation and the weights are equal up to rounding. The devices are
processes that communicate with gloo, and train all runs of a test one after the other.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moa_data.errors import TrainingError
from moa_data.moa.formats.checkpoint import load_drafter
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.object_stores import free_port
from moa_data.tests.kit.ranks import run_ranks
from moa_data.tests.kit.runs import SIZES, last_state, run, settings
from moa_data.trainer.config import TrainConfig
from moa_data.trainer.fit import read_metrics, train

STEPS: dict[str, Any] = {
    "max_steps": 4,
    "warmup_steps": 1,
    "validate_every": 2,
    "log_every": 1,
    "micro_batch_size": 2,
}
DRAFTERS: dict[str, dict[str, Any]] = SIZES | {
    "moa with a target layer": {"target_layer_inference": 1},
    "dspark on keys and values": {
        "context": "kv",
        "fused_layers": (1,),
        "block_layers": 1,
        "markov_rank": 8,
    },
    "dflash on a memory": {"context": "memory", "block_layers": 1, "block_size": 8},
}
MOST_OFF = 1e-5
"""Largest relative difference of the loss of each step, and of the norm of each weight tensor."""
MOST_OFF_OF_WAY = 1e-3
"""Largest difference of a weight tensor, relative to its distance from its initial value.

Adam divides small gradients by their own size, and Muon makes all directions equally long. So the
rounding of sums over devices is a larger share of this distance.
"""


def train_all(configs: list[TrainConfig]) -> None:
    """Train the runs one after the other. Each process of the test calls this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moa_data.trainer.fit.plot_curves", lambda run, out: out.touch())
        for config in configs:
            train(config)


def losses(out: Path) -> dict[str, list[tuple[int, float]]]:
    names = (
        "train/loss",
        "train/forward_kl",
        "val/kl",
        "val/top1_agreement",
        "val/expected_acceptance_length",
    )
    return {name: points for name, points in read_metrics(out).items() if name in names}


def assert_like(out: Path, one: Path, init: dict[str, torch.Tensor]) -> None:
    """Compare two runs: the figures of each step, and the weights.

    Differences of weights are relative to the distances from the initial weights.
    """
    expected, got = losses(one), losses(out)
    assert expected.keys() == got.keys()
    for name, points in expected.items():
        assert [step for step, _ in got[name]] == [step for step, _ in points]
        assert [value for _, value in got[name]] == pytest.approx(
            [value for _, value in points], rel=MOST_OFF
        ), name
    weights, others = last_state(one)["state_dict"], last_state(out)["state_dict"]
    for name, weight in weights.items():
        off, way = (
            float((weight.float() - other[name].float()).norm()) for other in (others, init)
        )
        assert off <= min(MOST_OFF * float(weight.float().norm()), MOST_OFF_OF_WAY * way), name
    exported = load_drafter(out).state_dict()
    for name, weight in load_drafter(one).state_dict().items():
        torch.testing.assert_close(exported[name], weight, rtol=1e-3, atol=1e-5)


def initial_weights(store: Path, out: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Return the weights before the first step, by a step with a rate of almost 0."""
    run(
        store,
        out,
        **changes | {"max_steps": 1, "learning_rate": 1e-30, "matrix_learning_rate": 1e-30},
    )
    return dict(last_state(out)["state_dict"])


@pytest.mark.slow
def test_two_machines_train_as_one(store_path: Path, tmp_path: Path) -> None:
    """One run trains on two machines from the start, another from a checkpoint of one device.

    Three validation batches are dealt to the two devices.
    """
    own = STEPS | {"drafter": "eagle"}
    one, whole, half = tmp_path / "one", tmp_path / "whole", tmp_path / "half"
    run(store_path, one, **own)
    init = initial_weights(store_path, tmp_path / "init", **own)
    run(store_path, half, stop_after_steps=2, **own)
    two = own | {"devices": 1, "num_nodes": 2}
    runs = [settings(store_path, whole, **two), settings(store_path, half, resume=True, **two)]
    run_ranks(2, train_all, runs, folder=tmp_path, n_nodes=2)
    for config in runs:
        assert_like(Path(config.out), one, init)
    # One device continues what two devices have trained.
    for out in (one, whole):
        run(store_path, out, resume=True, **own | {"max_steps": 6, "decay_steps": 4})
    ends = [last_state(out)["state_dict"] for out in (one, whole)]
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_drafter_on_two_devices(store_of_all: Path, tmp_path: Path, optimizer: str) -> None:
    """Train all steps on two devices, and half of them on one device, in both orders."""
    runs, resumed = [], []
    for name, sizes in DRAFTERS.items():
        own = STEPS | sizes | {"drafter": name.split()[0], "optimizer": optimizer}
        run(store_of_all, tmp_path / name / "one", **own)
        run(store_of_all, tmp_path / name / "half-two", stop_after_steps=2, **own)
        two = {"devices": 2}
        runs.append(settings(store_of_all, tmp_path / name / "two", **two, **own))
        runs.append(settings(store_of_all, tmp_path / name / "half-two", resume=True, **two, **own))
        runs.append(
            settings(store_of_all, tmp_path / name / "two-half", stop_after_steps=2, **two, **own)
        )
        resumed.append((tmp_path / name / "two-half", own))
    run_ranks(2, train_all, runs, folder=tmp_path)
    for out, own in resumed:
        run(store_of_all, out, resume=True, **own)
    for name, sizes in DRAFTERS.items():
        own = STEPS | sizes | {"drafter": name.split()[0], "optimizer": optimizer}
        init = initial_weights(store_of_all, tmp_path / name / "init", **own)
        for way in ("two", "half-two", "two-half"):
            assert_like(tmp_path / name / way, tmp_path / name / "one", init)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["lightning", "torchrun", "slurm", "by hand"])
def test_two_machines_by_launchers(store_path: Path, tmp_path: Path, launcher: str) -> None:
    """Start two machines in several ways.

    They are two agents of torchrun, two tasks of SLURM (only its environment), or the command on
    two machines by hand. Lightning itself starts both processes on one machine.
    """
    own = STEPS | {"drafter": "eagle", "num_nodes": 1 if launcher == "lightning" else 2}
    own |= {"devices": 2 if launcher == "lightning" else 1}
    run(store_path, tmp_path / "one", **STEPS | {"drafter": "eagle"})
    config = settings(store_path, tmp_path / "two", **own)
    (tmp_path / "two.yaml").write_text(config.to_yaml())
    command = ["-m", "moa_data", "train", "--config", str(tmp_path / "two.yaml")]
    running = [
        subprocess.Popen(
            [sys.executable, *prefix, *command],
            env=os.environ | more,
            stderr=subprocess.PIPE,
            text=True,
        )
        for prefix, more in launches(launcher)
    ]
    ended = [process.communicate(timeout=300)[1] for process in running]
    assert not any(process.returncode for process in running), ended
    assert not any("sync_dist" in text for text in ended)
    init = initial_weights(store_path, tmp_path / "init", **STEPS | {"drafter": "eagle"})
    assert_like(tmp_path / "two", tmp_path / "one", init)


def launches(launcher: str) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield each machine's words before the command, and its environment."""
    if launcher == "lightning":
        yield [], {}
        return
    port = str(free_port())
    for machine in ("0", "1"):
        if launcher == "torchrun":
            found = [
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"127.0.0.1:{port}",
                "--nproc-per-node",
                "1",
            ]
            yield ["-m", "torch.distributed.run", "--nnodes", "2", *found], {}
        elif launcher == "slurm":
            yield [], {
                "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2",
                "SLURM_JOB_ID": "1234",
                "SLURM_PROCID": machine, "SLURM_NODEID": machine, "SLURM_LOCALID": "0",
                "SLURM_NODELIST": "127.0.0.1,127.0.0.1", "SLURM_JOB_NAME": "train",
                "MASTER_PORT": port,
            }  # fmt: skip
        else:
            yield [], {"NODE_RANK": machine, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def test_refusals(store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises_naming(TrainingError, "batch_size", 32, 6):
        run(store_path, tmp_path / "run", num_nodes=2, devices=3, batch_size=32)
    # Otherwise two processes of one device each would train the same run twice, in one folder.
    for name, value in {
        "TORCHELASTIC_RUN_ID": "x",
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    for n_devices in (1, 3):
        with raises_naming(TrainingError, "2 processes", n_devices, "`devices`"):
            run(store_path, tmp_path / "run", devices=n_devices, batch_size=6)
