"""A drafter's sensitivity to keys and values is its Gauss-Newton matrix.

Codecs allocate their bits by it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.functional import jacobian

from moa_data.errors import (
    OptionInvalid,
    SelectionInvalid,
    StoreMismatch,
    TargetError,
    TrainingError,
)
from moa_data.moa.drafters.training import Draws
from moa_data.moa.formats.checkpoint import save_drafter
from moa_data.moa.targets.facts import TargetFacts
from moa_data.pipeline.forwards.calibrate import target_rope
from moa_data.pipeline.recode import recode
from moa_data.storage.codecs.transform import TransformCodec, TransformSettings
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import kv_field
from moa_data.tests.kit.command import refused
from moa_data.tests.kit.command import run as run_command
from moa_data.tests.kit.drafters import build, build_drafter, frozen_for, stored
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.models import build_model
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.training import build_store, tiny_model
from moa_data.trainer.sensitivity import DrafterMetrics, drawn_gradients

N_DRAWS = 170


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_store(tmp_path_factory.mktemp("exact") / "store", n_sequences=16)


def codec_of(model: Any, scope: str) -> TransformCodec:
    facts = TargetFacts.of_model(model)
    spec = kv_field(facts.n_layers, facts.n_kv_heads, facts.head_dim)
    return TransformCodec(spec, TransformSettings.parse(f"transform:1@{scope}"), target_rope(facts))


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        pytest.param("moa", {}, marks=pytest.mark.slow),
        pytest.param(
            "moa",
            {"layer_groups": 2, "unrotated_keys": True, "cross_attention_drafts": True},
            marks=pytest.mark.slow,
        ),
        ("dspark", {"context": "kv", "block_layers": 1, "fused_layers": (1,)}),
    ],
)
def test_the_mean_outer_product_of_drawn_gradients_is_the_gauss_newton_matrix(
    kind: str, form: dict[str, Any]
) -> None:
    # The derivative takes a backward pass per position and token of the vocabulary.
    model = build_model(vocab_size=24)
    drafter, codec = build(kind, model, **form), codec_of(model, "layer")
    frozen, layers = (
        frozen_for(drafter, model),
        drafter.config.reads.kv_layers,
    )
    tokens = torch.randint(5, 24, (1, 8), generator=torch.Generator().manual_seed(0))
    # This reads all layers.
    kv = stored(build_drafter(model), model, tokens, torch.ones_like(tokens)).kv
    assert kv is not None
    kv = kv.float().unflatten(-1, codec.spec.token_shape[1:])
    inputs = dataclasses.replace(stored(drafter, model, tokens, torch.ones_like(tokens)), kv=kv)
    draws = Draws(
        torch.tensor([4]), torch.zeros(1, dtype=torch.bool), torch.zeros(1, dtype=torch.int64)
    )
    parts = [part for group in codec.parts(kv[0]) for part in group]
    sizes = [part.shape[1] for part in parts]

    # The rows hold keys before RoPE and values of all layers, side by side.
    def logits(rows: torch.Tensor) -> torch.Tensor:
        cut = list(rows.split(sizes, dim=1))
        kv = codec.whole([cut[i : i + 2] for i in range(0, len(cut), 2)]).flatten(2)[None]
        kv = kv if layers is None else kv[:, :, list(layers)]
        outputs = drafter.drafted_features(frozen, dataclasses.replace(inputs, kv=kv), draws)
        found: torch.Tensor = drafter.draft_logits(frozen, outputs.features[outputs.valid])
        return found

    rows = torch.cat(parts, dim=1).detach()
    p = logits(rows).softmax(dim=-1).detach()
    derivative = jacobian(logits, rows)  # [P, V, T, components of all layers]
    curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    exact = torch.einsum("pvti,pvw,pwtj->ij", derivative, curvature, derivative)

    drawn, generator = torch.zeros_like(exact), torch.Generator().manual_seed(1)
    for _ in range(N_DRAWS):
        gradients = drawn_gradients(drafter, frozen, inputs, draws, codec, layers, generator)
        assert [part.shape[1] for part in gradients] == sizes
        own = torch.cat(gradients, dim=1)
        drawn += own.T @ own / N_DRAWS
    assert (drawn - exact).norm() < 0.19 * exact.norm()
    assert float(drawn.trace()) == pytest.approx(float(exact.trace()), rel=0.065)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("moa", {}),
        ("moa", {"layer_stride": 3, "layer_groups": 1}),
        ("glide", {}),
        ("dspark", {"context": "kv", "block_layers": 1, "fused_layers": (1,)}),
    ],
)
def test_metrics_of_what_a_drafter_reads(
    store_path: Path, kind: str, sizes: dict[str, Any]
) -> None:
    model = tiny_model()
    drafter, codec, seen = build(kind, model, **sizes), codec_of(model, "layer"), []
    with ActivationStore(store_path) as store:
        sequences = [1, 5, 6]
        metrics = DrafterMetrics(drafter, progress_to(lambda *told: seen.append(told[:2])))(
            store, codec, sequences
        )
    assert seen == [(0, 3), (1, 3), (2, 3)]
    assert [len(group) for group in metrics] == [2] * 3
    for group in metrics:
        for metric in group:
            assert metric.shape == (16, 16)
            np.testing.assert_allclose(metric, metric.T)
            assert np.linalg.eigvalsh(metric).min() > -1e-6 * max(np.trace(metric), 1e-12)
    reads = drafter.config.reads.kv_layers
    felt = [layer for layer in range(3) if np.trace(metrics[layer][1]) > 0]
    assert felt == ([0, 1, 2] if reads is None else sorted(layer % 3 for layer in reads))


def test_what_cannot_be_measured_is_refused(
    store_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model()
    codec, stranger, broken = codec_of(model, "all"), build_drafter(model), build("glide", model)
    stranger.config = dataclasses.replace(stranger.config, target={"weights_sha256": "cd" * 32})
    for weight in broken.parameters():
        weight.data.fill_(torch.nan)
    cases: list[tuple[Any, type[Exception], tuple[object, ...]]] = [
        (build("eagle", model), TrainingError, ("eagle", "`drafter`")),
        (build_drafter(build_model()), TargetError, ("n_layers", 4, 3)),
        (stranger, TargetError, ("cdcdcdcdcdcd", "abababababab")),
        (
            build_drafter(model, n_target_layers=2),
            SelectionInvalid,
            (store_path, "hidden/layer_0", "--activations hidden:layer:0"),
        ),
        (broken, TrainingError, ("NaN",)),
    ]
    with ActivationStore(store_path) as store:
        for drafter, error, facts in cases:
            with raises_naming(error, *facts):
                DrafterMetrics(drafter)(store, codec, [0])
        read = ActivationStore.read
        monkeypatch.setattr(
            ActivationStore, "read", lambda *given: read(*given) * np.float32(np.nan)
        )
        monkeypatch.setattr("moa_data.trainer.sensitivity.to_float32", lambda values, dtype: values)
        with raises_naming(TrainingError, store_path, "sequence 0"):
            DrafterMetrics(build("glide", model))(store, codec, [0])


def test_stores_that_no_drafter_can_be_measured_on_are_refused(
    store_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = DrafterMetrics(build("glide", tiny_model()))
    without = build_store(tmp_path / "without", ("hidden:last",), n_sequences=4)
    with raises_naming(OptionInvalid, tmp_path / "without", "`drafter`"):
        recode(without, "transform:2", tmp_path / "new", kv_metrics=metrics)
    monkeypatch.setattr("moa_data.pipeline.recode._MIN_RESPONSE", 100)
    with raises_naming(OptionInvalid, store_path, 100, "`drafter`"):
        recode(store_path, "transform:2@layer", tmp_path / "new", kv_metrics=metrics)


def test_a_store_for_a_drafter(store_path: Path, tmp_path: Path) -> None:
    """The drafter reads only the last layer.

    Its keys and values have smaller errors than in a store of the same size without the metrics.
    """
    drafter = build("glide", tiny_model())
    errors = {}
    for name, metrics in (("even", None), ("own", DrafterMetrics(drafter))):
        report = recode(store_path, "transform:2@layer", tmp_path / name, kv_metrics=metrics)
        assert report.n_parts_done == report.n_parts
        assert verify_store(tmp_path / name).ok
        with ActivationStore(store_path) as exact, ActivationStore(tmp_path / name) as coded:
            described = coded.manifest.codec["transform"]["kv"]["error_metric"]
            assert described == ("plain" if metrics is None else "given")
            wrong = [exact.read(i, "kv") - coded.read(i, "kv") for i in range(len(exact))]
        # [layer]
        errors[name] = np.square(np.concatenate(wrong), dtype=np.float64).mean(axis=(0, 2, 3, 4))
    assert errors["own"][2] < 0.2 * errors["even"][2]
    assert errors["own"][0] > 2 * errors["even"][0]

    again = recode(
        store_path, "transform:2@layer", tmp_path / "own", kv_metrics=DrafterMetrics(drafter)
    )
    assert again.n_parts_done == 0
    with ActivationStore(tmp_path / "own") as coded:
        assert (
            coded.manifest.identities["drafter.weights_sha256"] == DrafterMetrics(drafter).identity
        )
    other = build("glide", tiny_model(), seed=2)
    for folder, given in (
        ("own", None),
        ("own", DrafterMetrics(other)),
        ("even", DrafterMetrics(drafter)),
    ):
        with raises_naming(StoreMismatch, tmp_path / folder, "identities.drafter.weights_sha256"):
            recode(store_path, "transform:2@layer", tmp_path / folder, kv_metrics=given)


def test_the_command_refuses_in_one_line(store_path: Path, tmp_path: Path) -> None:
    for kind in ("moa", "eagle"):
        save_drafter(build(kind, tiny_model()), tmp_path / kind)
    out = ("--out", tmp_path / "new")
    given = ("recode", store_path, *out, "--drafter")
    refused(
        run_command(*given, tmp_path / "moa", "--codec", "int8"),
        "int8 gives all keys and values the same number of bits",
    )
    refused(
        run_command(*given, tmp_path / "eagle", "--codec", "transform:2"),
        "eagle drafter reads no keys and values",
    )
    refused(run_command(*given, tmp_path / "none", "--codec", "transform:2"), "none")
    assert not (tmp_path / "new").exists()
    done = run_command(*given, tmp_path / "moa", "--codec", "transform:2")
    assert done.exit_code == 0, done.output
    assert "transform:2" in done.stdout
