"""`moa-data export-drafter` writes a trained drafter in another program's format.

It loads the drafter again to check it.
"""

import json
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from moa_data.cli import main
from moa_data.errors import DrafterError, OptionInvalid, OutputOccupied, TargetError
from moa_data.moa.drafters.base import Drafter
from moa_data.moa.drafters.registry import drafter_class
from moa_data.moa.formats.checkpoint import LAYOUTS, load_drafter, save_drafter
from moa_data.moa.targets.bundle import FrozenTarget, hash_target
from moa_data.moa.targets.facts import TargetFacts
from moa_data.tests.kit.drafters import PAPER
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.families import FEATURES, GROUPED, build_family, works
from moa_data.tests.kit.variants import quick
from moa_data.trainer import export as drafter_export
from moa_data.trainer.config import DrafterExportConfig
from moa_data.trainer.export import export_drafter

from ..pipeline.exchange.conftest import extract_config, store, target

__all__ = ["extract_config", "store", "target"]  # These are fixtures.


KINDS: dict[str, dict[str, Any]] = {
    "moa": PAPER,
    "eagle": {},
    "eagle3": {"fused_layers": (0, 1, 2)},
    "dspark": {"block_layers": 1, "markov_rank": 8, "fused_layers": (0, 1, 2)},
    "dflash": {"block_layers": 1, "fused_layers": (0, 1, 2)},
    "independent": {},
}
"""Sizes that let each kind of drafter fit the layouts of other programs."""


def make_run(folder: Path, target: Path, store: Path, kind: str, **identity: str) -> Path:
    """Write a run like those that training leaves, of a drafter with random weights."""
    facts = TargetFacts.of(AutoConfig.from_pretrained(target))
    identity = hash_target(target) | identity
    build = drafter_class(kind)
    drafter: Drafter = build(build.config_class.from_target(facts, identity, **KINDS[kind]))
    drafter.initialize(torch.Generator().manual_seed(0))
    drafter.adopt(
        FrozenTarget.from_model(AutoModelForCausalLM.from_pretrained(target)),
        lambda: torch.zeros(0),
    )
    save_drafter(drafter, folder / "drafter")
    (folder / "run.yaml").write_text(yaml.safe_dump({"store": str(store), "drafter": kind}))
    return folder


@pytest.fixture(scope="module")
def runs(target: Path, store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each kind of drafter. Tests must not change them."""
    folder = tmp_path_factory.mktemp("runs")
    return {kind: make_run(folder / kind, target, store, kind) for kind in KINDS}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_format_from_a_run(
    runs: dict[str, Path], target: Path, tmp_path: Path, name: str
) -> None:
    run, out = runs[LAYOUTS[name].kind], tmp_path / "out"
    given: dict[str, Any] = {"drafter": str(run), "format": name, "out": str(out)}
    if name.startswith("speculators"):  # Its folders name the target's folder.
        with raises_naming(DrafterError, "`model`"):
            export_drafter(DrafterExportConfig.of(**given))
        given["model"] = str(target)
    report = export_drafter(DrafterExportConfig.of(**given))
    if name.startswith("speculators"):
        config = json.loads((out / "config.json").read_text())
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(target.resolve())
    assert {path.name for path in out.iterdir()} == {"config.json", "model.safetensors"}
    assert report.n_tensors == len(load_file(out / "model.safetensors"))
    assert report.written_bytes == (out / "model.safetensors").stat().st_size
    assert (
        f"reading it again gave equal weights\n{'note' if report.notes else ''}".strip()
        in report.describe()
    )
    before, after = load_drafter(run), load_drafter(out)
    assert before.config == after.config
    assert all(
        torch.equal(value, after.state_dict()[key]) for key, value in before.state_dict().items()
    )
    # Export from one format to the next, without the run.
    if name == "vllm-eagle":
        export_drafter(
            DrafterExportConfig(
                drafter=str(out),
                format="sglang-eagle",
                out=str(tmp_path / "next"),
                dtype="bfloat16",
            )
        )
        assert load_drafter(tmp_path / "next").config == before.config


def test_embeddings_are_the_targets_from_store_or_model(
    runs: dict[str, Path], target: Path, tmp_path: Path
) -> None:
    for name, model in (("store", None), ("model", str(target))):
        export_drafter(
            DrafterExportConfig(
                drafter=str(runs["eagle"]),
                format="eagle",
                out=str(tmp_path / name),
                model=model,
                dtype="bfloat16",
            )
        )
    from_store, from_model = (
        load_file(tmp_path / name / "model.safetensors") for name in ("store", "model")
    )
    assert torch.equal(from_store["embed_tokens.weight"], from_model["embed_tokens.weight"])
    weights = load_file(target / "model.safetensors")
    assert torch.equal(from_store["embed_tokens.weight"], weights["model.embed_tokens.weight"])
    for name, model in (("head of the store", None), ("head of the model", str(target))):
        out = str(tmp_path / name)
        export_drafter(
            DrafterExportConfig(drafter=str(runs["dspark"]), format="dspark", out=out, model=model)
        )
        copied = load_file(tmp_path / name / "model.safetensors")
        assert torch.equal(copied["lm_head.weight"], weights["lm_head.weight"].float())
        assert torch.equal(
            copied["embed_tokens.weight"], weights["model.embed_tokens.weight"].float()
        )


def test_what_cannot_be_exported_is_named(
    runs: dict[str, Path],
    target: Path,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    eagle, out = str(runs["eagle"]), str(tmp_path / "out")
    with raises_naming(OptionInvalid, "'eagle4'", "moa-vllm", "'int8'", "float32"):
        DrafterExportConfig.of(drafter=eagle, format="eagle4", out=out, dtype="int8")
    assert get_args(DrafterExportConfig.model_fields["format"].annotation) == tuple(LAYOUTS)
    with raises_naming(DrafterError, "moa", "eagle", "`format`"):
        export_drafter(DrafterExportConfig(drafter=eagle, format="moa", out=out))
    with raises_naming(DrafterError, tmp_path / "nowhere"):
        export_drafter(
            DrafterExportConfig(drafter=str(tmp_path / "nowhere"), format="moa", out=out)
        )
    with raises_naming(OutputOccupied, eagle):
        export_drafter(DrafterExportConfig(drafter=eagle, format="vllm-eagle", out=eagle))
    with raises_naming(TargetError, "/nowhere"):
        export_drafter(
            DrafterExportConfig(drafter=eagle, format="eagle", out=out, model="/nowhere")
        )
    other = make_run(tmp_path / "other", target, store, "eagle", weights_sha256="ef" * 32)
    for model in (str(target), str(store), None):
        with raises_naming(TargetError, "ef" * 6):
            export_drafter(
                DrafterExportConfig(drafter=str(other), format="eagle", out=out, model=model)
            )
    gone = make_run(tmp_path / "gone", target, tmp_path / "no-store", "eagle")
    with raises_naming(TargetError, gone, tmp_path / "no-store", "`model`"):
        export_drafter(DrafterExportConfig(drafter=str(gone), format="eagle", out=out))
    (gone / "run.yaml").unlink()
    with raises_naming(TargetError, gone / "drafter", "`model`"):
        export_drafter(DrafterExportConfig(drafter=str(gone / "drafter"), format="eagle", out=out))
    assert not Path(out).exists()

    def damaged(folder: Path) -> Any:  # The disk changes the data that it writes.
        weights = load_file(folder / "model.safetensors")
        save_file(weights | {"fc.weight": weights["fc.weight"] + 1}, folder / "model.safetensors")
        return load_drafter(folder)

    # The first load is that of the run, the second one that of the exported folder.
    loads = iter((load_drafter, damaged))
    monkeypatch.setattr(drafter_export, "load_drafter", lambda folder: next(loads)(folder))
    with raises_naming(DrafterError, "fc.weight"):
        export_drafter(DrafterExportConfig(drafter=eagle, format="vllm-eagle", out=out))
    assert {path.name for path in tmp_path.iterdir()} == {"other", "gone"}


def test_the_command_says_what_it_did_and_how_it_failed(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    arguments = [
        "export-drafter",
        str(runs["eagle"]),
        "--format",
        "sglang-eagle",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 0, done.output
    assert "eagle drafter for SGLang (sglang-eagle), 19 tensors" in done.output
    assert json.loads((out / "config.json").read_text())["architectures"] == [
        "LlamaForCausalLMEagle"
    ]
    again = CliRunner().invoke(main, arguments)
    assert again.exit_code == 2
    assert "is not an empty folder. Choose another output folder" in again.output


def test_formats_without_embeddings_are_refused_where_the_target_scales_them(
    tmp_path: Path,
) -> None:
    """The engine feeds the drafter the target's embeddings as stored, without the scale."""
    target = tmp_path / "gemma"
    build_family("gemma3_text", head_dim=12).save_pretrained(target)
    run = make_run(tmp_path / "run", target, tmp_path / "none", "eagle")
    given: dict[str, Any] = {
        "drafter": str(run),
        "model": str(target),
        "out": str(tmp_path / "out"),
    }
    with raises_naming(DrafterError, "gemma3_text", "vllm-eagle", "speculators-eagle3"):
        export_drafter(DrafterExportConfig.of(format="vllm-eagle", **given))
    assert not (tmp_path / "out").exists()
    export_drafter(DrafterExportConfig.of(format="eagle", **given))
    held = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    seen = FrozenTarget.from_model(AutoModelForCausalLM.from_pretrained(target)).embed(
        torch.arange(len(held))
    )
    torch.testing.assert_close(held, seen)


@pytest.mark.parametrize("name", quick(FEATURES, ("deepseek_v3",)))
def test_formats_of_families(name: str, tmp_path: Path) -> None:
    """Each format that the support table lists is written; the others are refused.

    The heads of these targets fill the width.
    """
    target, sizes = (
        tmp_path / "target",
        dict[str, Any](num_attention_heads=3, num_key_value_heads=3, head_dim=16),
    )
    sizes |= (
        {"global_head_dim": 16, "kv_lora_rank": 24, "qk_rope_head_dim": 16}
        if name in GROUPED
        else {}
    )
    if name in ("gpt_oss", "ministral3"):  # These families scale their rotary embedding by default.
        sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    build_family(name, **sizes).save_pretrained(target)
    given: dict[str, Any] = {"model": str(target), "out": str(tmp_path / "out")}
    for layout in LAYOUTS.values():
        run, letters = tmp_path / layout.kind, works(name, layout.kind)
        given |= {"drafter": str(run), "format": layout.name}
        if not run.exists():
            make_run(run, target, tmp_path / "none", layout.kind)
        if "E" in letters or ("e" in letters and (layout.holds_embeddings or layout.name == "moa")):
            export_drafter(DrafterExportConfig.of(**given))
            shutil.rmtree(tmp_path / "out")
        else:
            with pytest.raises(DrafterError, match=r"scales its embeddings|kv_groups|qkv_bias"):
                export_drafter(DrafterExportConfig.of(**given))
