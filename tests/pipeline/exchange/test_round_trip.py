"""Exported files hold the states that transformers computes, and importing restores the store.

Interruptions, damaged files and foreign files do not change that.
"""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from moa_data.errors import (
    DatasetError,
    OptionInvalid,
    OutputOccupied,
    SelectionInvalid,
    TargetError,
)
from moa_data.moa.targets.bundle import FrozenTarget
from moa_data.moa.targets.live import Target
from moa_data.pipeline.config import ExtractConfig
from moa_data.pipeline.exchange.config import ExportConfig, Format, ImportConfig
from moa_data.pipeline.exchange.formats import make_format
from moa_data.pipeline.exchange.transfer import export_store, import_folder
from moa_data.pipeline.extract import extract
from moa_data.storage.read.store import ActivationStore
from moa_data.storage.read.verify import verify_store
from moa_data.storage.schema import to_float32
from moa_data.tests.kit.chats import random_chats, write_jsonl
from moa_data.tests.kit.command import refused, run
from moa_data.tests.kit.errors import raises_naming
from moa_data.tests.kit.families import write_family
from moa_data.tests.kit.models import write_target
from moa_data.tests.kit.progress import progress_to
from moa_data.tests.kit.stores import read_tree
from moa_data.tests.kit.variants import quick, quick_rows
from moa_data.text import Progress


def export(store: Path, name: Format, out: Path, **options: Any) -> Path:
    export_store(ExportConfig(store=str(store), format=name, out=str(out), **options))
    return out


def bring_in(
    folder: Path, name: Format, target: Path, out: Path, **options: Any
) -> ActivationStore:
    import_folder(
        ImportConfig(folder=str(folder), format=name, model=str(target), out=str(out), **options)
    )
    return ActivationStore(out)


def by_id(store: ActivationStore) -> dict[str, int]:
    return {
        sequence_id: i for i, sequence_id in enumerate(store.sequences["sequence_id"].to_pylist())
    }


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file but those with the fingerprint that `datasets` draws at random."""
    drawn = ("state.json", "dataset_info.json")
    return {name: data for name, data in read_tree(folder).items() if not name.endswith(drawn)}


def stop_at(n: int) -> Progress:
    calls = list[int]()

    def progress(done: int, _total: int, message: str) -> None:
        calls.extend([done] * (not message.startswith("read")))
        if len(calls) == n:
            raise KeyboardInterrupt

    return progress_to(progress)


@pytest.mark.parametrize(
    ("name", "zipped"),
    quick_rows(
        [*((name, False) for name in get_args(Format)), ("specforge", True)],
        [("eagle", False), ("specforge", True)],
    ),
)
def test_round_trip_keeps_every_bit(
    store: Path, target: Path, tmp_path: Path, name: Format, zipped: bool
) -> None:
    folder = export(store, name, tmp_path / "out")
    # SpecForge can write compressed files like these.
    for path in list(folder.rglob("*.ckpt")) if zipped else ():
        path.with_name(f"{path.name}.gz").write_bytes(
            gzip.compress(path.read_bytes(), compresslevel=1)
        )
        path.unlink()
    back = bring_in(folder, name, target, tmp_path / "back", part_tokens=300)
    original = ActivationStore(store)
    assert len(back) == len(original)
    assert len(back.commits) > 1
    there = by_id(original)
    exact = [field for field in back.fields if field != "hidden/last" or name != "speculators"]
    assert len(exact) == {"speculators": 6, "specforge": 6, "eagle": 3}[name]
    for sequence_id, i in by_id(back).items():
        for field in exact:
            np.testing.assert_array_equal(
                back.read(i, field), original.read(there[sequence_id], field)
            )
    assert verify_store(tmp_path / "back").ok
    assert (
        back.manifest.identities["target.weights_sha256"]
        == original.manifest.identities["target.weights_sha256"]
    )
    assert (tmp_path / "back" / "README.md").is_file()
    assert FrozenTarget.load(back.target_path).n_layers == 0


def test_speculators_last_state_goes_through_the_final_norm(
    store: Path, target: Path, tmp_path: Path
) -> None:
    back = bring_in(
        export(store, "speculators", tmp_path / "out"), "speculators", target, tmp_path / "back"
    )
    weight = FrozenTarget.load(back.target_path).norm.weight.double().numpy()
    original, there = ActivationStore(store), by_id(ActivationStore(store))
    for sequence_id, i in list(by_id(back).items())[:4]:
        before = to_float32(back.read(i, "hidden/layer_7"), "bfloat16").astype(np.float64)
        expected = before / np.sqrt((before**2).mean(-1, keepdims=True) + 1e-6) * weight
        got = to_float32(back.read(i, "hidden/last"), "bfloat16")
        np.testing.assert_allclose(got, expected, rtol=2**-8)  # one rounding to bfloat16
        live = to_float32(original.read(there[sequence_id], "hidden/last"), "bfloat16")
        # The extraction rounded only after the norm.
        np.testing.assert_allclose(got, live, rtol=2**-5, atol=2e-2)


@pytest.mark.parametrize(
    "name", quick(["cohere2", "gemma", "gemma2", "nemotron", "gpt2"], ["cohere2", "gemma"])
)
def test_the_final_norm_is_that_of_the_family(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some differ from Llama's, some add 1 to their weights. Unknown families are refused."""
    model, data = (
        write_family(tmp_path / "model", name),
        write_jsonl(tmp_path / "chats.jsonl", random_chats(3)),
    )
    chosen = ("hidden:last", *(f"hidden:layer:{layer}" for layer in (0, 1, 2, 3)))
    out = str(tmp_path / "store")
    extract(
        ExtractConfig.of(
            model=str(model), dataset=str(data), out=out, activations=chosen, device="cpu"
        )
    )
    folder = export(Path(out), "speculators", tmp_path / "out", layers=(0, 1, 2))
    for _ in range(2):  # The second time, the target's bundle is already in the store.
        back = bring_in(folder, "speculators", model, tmp_path / "back", layers=(0, 1, 2))
    original, there = ActivationStore(out), by_id(ActivationStore(out))
    for sequence_id, i in by_id(back).items():
        got = to_float32(back.read(i, "hidden/last"), "bfloat16")
        live = to_float32(original.read(there[sequence_id], "hidden/last"), "bfloat16")
        np.testing.assert_allclose(got, live, rtol=2**-5, atol=2e-2)
    monkeypatch.setattr("moa_data.moa.targets.bundle._FINAL_NORMS", ())
    with raises_naming(TargetError, name):
        bring_in(folder, "speculators", model, tmp_path / "refused", layers=(0, 1, 2))
    assert not (tmp_path / "refused").exists()


def test_keys_and_values_of_the_last_layers(tmp_path: Path) -> None:
    """Export the last layer with a window and the last one without.

    The exported keys and values are those of the store, bit for bit.
    """
    mixed = write_target(
        tmp_path / "mixed", family="qwen2-mixed", num_hidden_layers=4, sliding_window=6
    )
    data = write_jsonl(tmp_path / "chats.jsonl", random_chats(3))
    activations = ("kv", *(f"hidden:layer:{layer}" for layer in (0, 1, 3)))
    out = str(tmp_path / "store")
    extract(
        ExtractConfig.of(
            model=str(mixed), dataset=str(data), out=out, activations=activations, device="cpu"
        )
    )
    folder = export(Path(out), "speculators", tmp_path / "out", layers=(0, 1), kv=True)
    original = ActivationStore(out)
    for i in range(len(original)):
        record = load_file(folder / "hidden_states" / f"hs_{i}.safetensors")
        for kind, layer in (("local", 3), ("global", 2)):
            # [S, 1, H_kv, 2, d]
            stored = torch.from_numpy(original.read(i, "kv", layers=[layer])).view(torch.bfloat16)
            for index, part in enumerate("kv"):
                assert record[f"kv_last_{kind}_{part}"].shape == (original.lengths[i], 2, 8)
                assert torch.equal(record[f"kv_last_{kind}_{part}"], stored[:, 0, :, index])
    back = bring_in(folder, "speculators", mixed, tmp_path / "back", layers=(0, 1))
    assert "kv" not in back.fields
    with raises_naming(SelectionInvalid, tmp_path / "back", "kv"):
        export(tmp_path / "back", "speculators", tmp_path / "again", layers=(0, 1), kv=True)


def test_chosen_layers_and_max_sequences(store: Path, target: Path, tmp_path: Path) -> None:
    folder = export(store, "specforge", tmp_path / "out", layers=(4, 1), max_sequences=5)
    record = torch.load(folder / "rows_0-2000" / "data_4.ckpt", weights_only=True)
    assert record["aux_hidden_state"].shape[-1] == 64
    assert not (folder / "rows_0-2000" / "data_5.ckpt").exists()
    back = bring_in(folder, "specforge", target, tmp_path / "back", layers=(4, 1))
    original = ActivationStore(store)
    i = by_id(back)[original.sequences["sequence_id"][4].as_py()]
    for field in ("hidden/layer_1", "hidden/layer_4"):
        np.testing.assert_array_equal(back.read(i, field), original.read(4, field))
    with raises_naming(DatasetError, 3, 32, 64, "`layers`"):
        bring_in(folder, "specforge", target, tmp_path / "wrong")


@pytest.mark.parametrize("name", get_args(Format))
def test_an_interrupted_export_goes_on_and_ends_in_equal_files(
    store: Path, tmp_path: Path, name: Format
) -> None:
    whole = contents(export(store, name, tmp_path / "whole"))
    config = ExportConfig(store=str(store), format=name, out=str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        export_store(config, progress=stop_at(5))
    report = export_store(config)
    assert "12 sequences" in report
    # The export finishes the files that it was writing when it was stopped.
    assert "This run wrote 7 of them" in report
    assert contents(tmp_path / "out") == whole
    assert "This run wrote 0 of them" in export_store(config)
    assert not list((tmp_path / "out").rglob("*.partial*"))


@pytest.mark.parametrize("name", get_args(Format))
def test_a_resumed_export_refuses_a_file_with_other_tokens(
    store: Path, tmp_path: Path, name: Format
) -> None:
    config = ExportConfig(store=str(store), format=name, out=str(tmp_path / "out"))
    with pytest.raises(KeyboardInterrupt):
        export_store(config, progress=stop_at(5))
    first, second = sorted((tmp_path / "out").rglob("*_[12].*"))
    shutil.copyfile(first, second)
    with raises_naming(OutputOccupied, second, "sequence 2"):
        export_store(config)


def test_an_interrupted_import_goes_on_and_ends_in_equal_files(
    store: Path, target: Path, tmp_path: Path
) -> None:
    folder = export(store, "specforge", tmp_path / "out")
    bring_in(folder, "specforge", target, tmp_path / "whole", part_tokens=256)
    config = ImportConfig(
        folder=str(folder),
        format="specforge",
        model=str(target),
        out=str(tmp_path / "back"),
        part_tokens=256,
    )
    with pytest.raises(KeyboardInterrupt):
        import_folder(config, progress=stop_at(6))
    assert (
        0 < import_folder(config).n_parts_done < ActivationStore(tmp_path / "back").manifest.n_parts
    )
    assert read_tree(tmp_path / "back") == read_tree(tmp_path / "whole")


@pytest.mark.parametrize("name", get_args(Format))
def test_a_resumed_import_loads_the_target_only_for_the_bundle(
    store: Path, target: Path, tmp_path: Path, name: Format, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = export(store, name, tmp_path / "out")
    loads, load = list[Any](), Target.load

    def counted(*arguments: Any) -> Any:
        loads.append(arguments)
        return load(*arguments)

    monkeypatch.setattr(Target, "load", counted)
    for damaged, n_loads in (("", 1), ("", 1), ("part-00000", 1), ("target", 2)):
        (tmp_path / "back" / "commits" / f"{damaged}.json").unlink(missing_ok=True)
        assert len(bring_in(folder, name, target, tmp_path / "back", part_tokens=256)) == 12
        assert len(loads) == n_loads
    bring_in(folder, name, target, tmp_path / "whole", part_tokens=256)
    assert read_tree(tmp_path / "back") == read_tree(tmp_path / "whole")


def test_a_folder_with_something_else_is_refused(
    store: Path, recipe_store: Path, tmp_path: Path
) -> None:
    export(store, "eagle", tmp_path / "out", max_sequences=4)
    others: list[tuple[Path, Format, int]] = [
        (store, "specforge", 4),
        (recipe_store, "eagle", 4),
        (store, "eagle", 2),
    ]
    for other, name, n in others:
        with pytest.raises(OutputOccupied):
            export(other, name, tmp_path / "out", max_sequences=n)
    assert "This run wrote 8 of them" in export_store(
        ExportConfig(store=str(store), format="eagle", out=str(tmp_path / "out"))
    )
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with raises_naming(OutputOccupied, tmp_path / "mine"):
        export(store, "eagle", tmp_path / "mine")
    (tmp_path / "mine" / "export.json").write_text("{}")
    with raises_naming(OutputOccupied, tmp_path / "mine" / "export.json"):
        export(store, "eagle", tmp_path / "mine")


def test_a_store_without_a_field_names_the_command_that_adds_it(
    store: Path, recipe_store: Path, tmp_path: Path
) -> None:
    lacking = run(
        "export", recipe_store, "--format", "specforge", "--layers", "2", "--out", tmp_path / "out"
    )
    refused(lacking, f"`moa-data add {recipe_store} --model MODEL --activations hidden:layer:2")
    assert not (tmp_path / "out").exists()
    done = run("export", store, "--format", "eagle", "--out", tmp_path / "out")
    assert "This run wrote 12 of them" in done.stdout, done.output


@pytest.mark.parametrize(
    "options",
    [{"format": "gguf"}, {"format": "eagle", "layers": (1,)},
     {"format": "speculators", "layers": (1, 1)},
     {"format": "eagle", "kv": True}],
)  # fmt: skip
def test_options_are_checked_before_anything_is_read(options: dict[str, Any]) -> None:
    with pytest.raises(OptionInvalid):
        ExportConfig.of(store="s", out="o", **options)


def official_eagle(folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """Write files as EAGLE's generator does: fp16, one folder per rank."""
    draw = torch.Generator().manual_seed(0)
    for rank in (0, 1):
        (folder / str(rank)).mkdir(parents=True)
        for i in range(11):
            record = {
                "input_ids": torch.randint(0, 400, (5 + i,), generator=draw),
                "hidden_state": torch.randn(5 + i, 32, generator=draw).to(dtype),
                "loss_mask": torch.cat([torch.zeros(3), torch.ones(2 + i)]).long(),
            }
            torch.save(record, folder / str(rank) / f"data_{i}.ckpt")
    return folder


def test_official_eagle_files_come_in_as_they_are(target: Path, tmp_path: Path) -> None:
    folder = official_eagle(tmp_path / "data")
    back = bring_in(folder, "eagle", target, tmp_path / "back")
    rows = back.sequences["source_row"].to_pylist()
    assert sorted(rows) == list(range(22))
    assert back.fields["hidden/last"].dtype == "float16"
    # File 10 of rank 1 comes last, since the numbers in names are compared as numbers.
    i = rows.index(21)
    record = torch.load(folder / "1" / "data_10.ckpt", weights_only=True)
    np.testing.assert_array_equal(back.read(i, "hidden/last"), record["hidden_state"].numpy())
    np.testing.assert_array_equal(back.read(i, "tokens"), record["input_ids"].numpy())
    # A text that occurs twice is imported once.
    shutil.copy(folder / "0" / "data_3.ckpt", folder / "1" / "data_3.ckpt")
    done = run("import", folder, "--format", "eagle", "--model", target, "--out", tmp_path / "once")
    assert "1 duplicate left out" in done.stdout


class Evil:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch evil-was-run",)


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"hidden_state": torch.randn(4, 32)}, ("hidden_state", [4, 32])),
        ({"hidden_state": torch.randn(5, 16)}, (16, 32)),
        ({"hidden_state": torch.randn(5, 32).double()}, ("float64",)),
        ({"hidden_state": torch.full((5, 32), torch.nan).half()}, ("hidden/last", "NaN")),
        ({"hidden_state": None}, ("hidden_state", "`format`")),
        ({"input_ids": torch.tensor([1, 2, 3, 4, 4000])}, (4000, 400)),
        ({"loss_mask": torch.tensor([0, 0, 2, 1, 1])}, ("loss mask", 2)),
        ({"loss_mask": torch.ones(4)}, ("loss mask", 4, 5)),
        ({"more": Evil()}, ()),
    ],
)
def test_a_bad_file_is_named(
    target: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    facts: tuple[object, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = official_eagle(tmp_path / "data")
    path = folder / "0" / "data_0.ckpt"
    torch.save(torch.load(path, weights_only=True) | change, path)
    with raises_naming(DatasetError, path.relative_to(tmp_path), *facts):
        bring_in(folder, "eagle", target, tmp_path / "back")
    assert not (tmp_path / "evil-was-run").exists()


def test_files_whose_masks_are_zero_everywhere_are_refused(target: Path, tmp_path: Path) -> None:
    folder = official_eagle(tmp_path / "data")
    for path in folder.rglob("*.ckpt"):
        record = torch.load(path, weights_only=True)
        torch.save(record | {"loss_mask": torch.zeros_like(record["loss_mask"])}, path)
    with raises_naming(DatasetError, 22):
        bring_in(folder, "eagle", target, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_damaged_and_foreign_files_are_named(store: Path, target: Path, tmp_path: Path) -> None:
    folder = export(store, "specforge", tmp_path / "gz", max_sequences=2)
    path = folder / "rows_0-2000" / "data_1.ckpt.gz"
    whole = gzip.compress(path.with_suffix("").read_bytes())
    path.with_suffix("").unlink()
    for content in (whole[:-30], b"no gzip", gzip.compress(b"no checkpoint")):
        path.write_bytes(content)
        with raises_naming(DatasetError, path):
            bring_in(folder, "specforge", target, tmp_path / "back")
    plain = export(store, "eagle", tmp_path / "eagle", max_sequences=2)
    file = plain / "0" / "data_1.ckpt"
    file.write_bytes(file.read_bytes()[:500])
    cases: list[tuple[Path, Format]] = [
        (plain, "eagle"),
        (plain, "speculators"),
        (tmp_path / "no", "eagle"),
    ]
    for (source, name), fact in zip(cases, (file, plain, tmp_path / "no"), strict=True):
        with raises_naming(DatasetError, fact):
            bring_in(source, name, target, tmp_path / "back")


@pytest.mark.parametrize("name", get_args(Format))
def test_a_cut_file_is_named_with_advice_that_works(
    store: Path, target: Path, tmp_path: Path, name: Format
) -> None:
    folder = export(store, name, tmp_path / "out", max_sequences=2)
    for path in [*folder.rglob("*_1.*"), *folder.glob("*.arrow"), *folder.glob("[ds]*.json")]:
        whole = path.read_bytes()
        for n_bytes in (len(whole) // 2, 0):
            path.write_bytes(whole[:n_bytes])
            with raises_naming(DatasetError, path, "damaged", "Delete it"):
                bring_in(folder, name, target, tmp_path / "back")
            if "_1." in path.name:
                with raises_naming(DatasetError, path, "damaged", "Delete it"):
                    export(store, name, folder, max_sequences=2)
            path.unlink()
            export(store, name, folder, max_sequences=2)
            # `datasets` draws a fingerprint at random and writes it to the JSON files.
            assert path.read_bytes() == whole or path.suffix == ".json"
    assert len(bring_in(folder, name, target, tmp_path / "back")) == 2


def test_speculators_files_must_belong_to_their_rows(
    store: Path, target: Path, tmp_path: Path
) -> None:
    folder = export(store, "speculators", tmp_path / "out", max_sequences=3)
    path = folder / "hidden_states" / "hs_1.safetensors"
    good = load_file(path)

    def refused_with(*facts: object) -> None:
        with raises_naming(DatasetError, *facts):
            bring_in(folder, "speculators", target, tmp_path / "back")

    for change, fact in (
        ({"token_ids": good["token_ids"] + 1}, "row 1"),
        ({"hidden_states": good["hidden_states"][:, :2].contiguous()}, "`layers`"),
    ):
        save_file(good | change, path)
        refused_with(path, fact)
    save_file({"token_ids": good["token_ids"]}, path)
    refused_with(path, "`format`")
    path.rename(path.with_name("hs_7.safetensors"))
    refused_with(path.with_name("hs_7.safetensors"), "row 7")
    path.with_name("hs_7.safetensors").unlink()  # A peer's folder may hold only a part of the rows.
    assert len(bring_in(folder, "speculators", target, tmp_path / "part")) == 2
    arrow = next(folder.glob("data-*.arrow"))
    original = arrow.read_bytes()
    arrow.unlink()
    os.mkfifo(arrow)  # Opening it would wait for a writer.
    refused_with(folder, arrow.name, "FIFO")
    arrow.unlink()
    arrow.symlink_to("nowhere")
    refused_with(folder, arrow.name, "is missing")
    arrow.unlink()
    arrow.write_bytes(original)
    (folder / "state.json").write_text(json.dumps({"_data_files": []}))
    refused_with(folder, "input_ids", "loss_mask")
    (folder / "state.json").unlink()
    refused_with(folder / "hidden_states", "state.json")


def test_speculators_fp8_states_are_read_with_their_scales(
    store: Path, target: Path, tmp_path: Path
) -> None:
    """The scales are as in ``hs_connectors/fp8_utils.py``: one per token, for all its layers."""
    folder = export(store, "speculators", tmp_path / "out", max_sequences=2)
    meant: dict[int, torch.Tensor] = {}
    for path in sorted((folder / "hidden_states").iterdir()):
        good = load_file(path)
        states = good["hidden_states"].float()
        scales = (states.abs().amax(dim=(1, 2), keepdim=True) / 448).clamp(min=1e-12)
        stored = (states / scales).to(torch.float8_e4m3fn)
        save_file(good | {"hidden_states": stored, "hidden_states_scales": scales}, path)
        meant[len(meant)] = stored.to(torch.bfloat16) * scales.to(torch.bfloat16)
        error = (meant[len(meant) - 1].float() - states).abs()
        assert bool((error <= 2**-4 * states.abs() + states.abs().max() / 448).all())
    back = bring_in(folder, "speculators", target, tmp_path / "back")
    assert len(back) == 2
    for row, states in meant.items():
        got = to_float32(back.read(row, "hidden/layer_1"), "bfloat16")
        np.testing.assert_array_equal(got, states[:, 0].float().numpy())
    save_file(
        {name: value for name, value in load_file(path).items() if "scales" not in name}, path
    )
    with raises_naming(DatasetError, path, "hidden_states_scales"):
        bring_in(folder, "speculators", target, tmp_path / "again")
    save_file(load_file(path) | {"hidden_states_scales": torch.ones(3, 1, 1)}, path)
    with raises_naming(DatasetError, path, "hidden_states_scales", 3):
        bring_in(folder, "speculators", target, tmp_path / "again")


BFLOAT16: dict[str, Any] = {"rtol": 2**-7, "atol": 1e-2}


@pytest.fixture(scope="module")
def model(target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)


@torch.inference_mode()
def live(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The nine hidden states [n, E] of transformers.

    They are the embeddings, the outputs of layers 1 to 7, and the states after the final norm.
    """
    return tuple(state[0] for state in model(tokens[None], output_hidden_states=True).hidden_states)


def test_speculators_slots_are_states_after_2_4_5_layers_and_the_last_before_the_norm(
    store: Path, model: Any, tmp_path: Path
) -> None:
    export_store(
        ExportConfig(store=str(store), format="speculators", out=str(tmp_path), max_sequences=2)
    )
    record = load_file(tmp_path / "hidden_states" / "hs_0.safetensors")
    rows, original = load_from_disk(str(tmp_path)), ActivationStore(store)
    assert rows.with_format(None)["seq_len"][:] == original.lengths[:2].tolist()
    assert torch.equal(record["token_ids"], rows[0]["input_ids"])
    assert rows[1]["loss_mask"].tolist() == original.read(1, "response_mask").tolist()
    with safe_open(tmp_path / "hidden_states" / "hs_0.safetensors", framework="pt") as file:
        assert file.metadata() == {"target_layer_ids": "2,4,5,8"}
    states = live(model, record["token_ids"])
    slots = record["hidden_states"].float()
    for slot, layers_passed in enumerate((2, 4, 5)):
        torch.testing.assert_close(slots[:, slot], states[layers_passed], **BFLOAT16)
    with torch.inference_mode():
        torch.testing.assert_close(model.model.norm(slots[:, 3]), states[8], rtol=2**-6, atol=2e-2)
    # The final norm of this target is not close to the identity.
    assert not torch.allclose(slots[:, 3], states[8], **BFLOAT16)


def test_specforge_and_eagle_hold_the_last_state_after_the_norm(
    store: Path, model: Any, tmp_path: Path
) -> None:
    files: dict[Format, str] = {"specforge": "rows_0-2000/data_0.ckpt", "eagle": "0/data_0.ckpt"}
    for name, file in files.items():
        export_store(
            ExportConfig(store=str(store), format=name, out=str(tmp_path / name), max_sequences=1)
        )
        record = torch.load(tmp_path / name / file, weights_only=True)
        states = live(model, record["input_ids"])
        last = record["hidden_state"].float()
        torch.testing.assert_close(last[0] if name == "specforge" else last, states[8], **BFLOAT16)
        if name == "specforge":
            aux = torch.cat([states[2], states[4], states[5]], dim=-1)
            torch.testing.assert_close(record["aux_hidden_state"][0].float(), aux, **BFLOAT16)


def test_default_layers_are_those_of_eagle_3() -> None:
    fields = [make_format("specforge", (), n_layers).fields for n_layers in (32, 7)]
    assert fields == [
        ("hidden/last", *(f"hidden/layer_{n}" for n in layers))
        for layers in ((1, 15, 28), (1, 2, 3))
    ]
    for layers, n_layers in (((), 1), ((), 6), ((6,), 6)):
        with raises_naming(OptionInvalid, "`layers`", n_layers):
            make_format("specforge", layers, n_layers)
