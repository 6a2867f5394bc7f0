"""The benchmark of a GPU runs on a CPU at tiny sizes."""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from moa_data.moa.drafters.registry import DRAFTERS

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu" / "gpu.sh"
DECODE, TRAIN = (
    ["decode", "graphs", "tests", "sampling"],
    ["train", "extract", "train-tests", "codecs", "transform"],
)


def run(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the script with this interpreter."""
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.run([SCRIPT, *words], env=environment, capture_output=True, text=True)


def positive(found: dict[str, Any], *names: str) -> None:
    """Check that the figures exist, are finite and are above 0."""
    for name in names:
        values = found[name] if isinstance(found[name], list) else [found[name]]
        assert values, name
        assert all(math.isfinite(value) and value > 0 for value in values), (name, values)


@pytest.mark.slow
def test_every_step_writes_its_record(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run(out, "--device", "cpu", "--tiny", "--peak-tflops", "0.05", "--limit-s", "1800")
    logs = "\n".join(f"{log.name}\n{log.read_text()[-2000:]}" for log in out.glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    records: dict[str, list[Any]] = {}
    for file in sorted(out.glob("*.json")):
        records.setdefault(re.sub(r"-\d{4}-\d\d-\d\dT\w+$", "", file.stem), []).append(
            json.loads(file.read_text())
        )
    assert {name: len(found) for name, found in records.items()} == {
        "extract": 1, "train-step": 1, "codec-shape": 2, "sampling": 1, "decode": 1,
        "decode-graphs": 1,
    }  # fmt: skip
    for name in ("tests", "train-tests"):
        assert "<testsuite " in (out / f"{name}.xml").read_text()
    seconds = (
        "forwards_and_gathering_s",
        "encoders_cpu_s",
        "writer_thread_cpu_s",
        "extract_s",
        "forward_s",
    )
    positive(
        records["extract"][0]["figures"],
        *seconds,
        "flops",
        "forward_mfu",
        "extract_mfu",
        "extract_tokens_per_s",
    )
    assert records["extract"][0]["figures"]["copies_s"] == [0.0], "nothing is copied on a CPU"
    steps = records["train-step"][0]["steps"]
    assert list(steps) == list(DRAFTERS)
    for kind, found in steps.items():
        positive(found, "mfu", "flops", "step_s", "forward_s", "peak_bytes", "micro_batch", "loss")
        assert bool(found["attention_kernels"]) == (kind != "medusa"), (
            "Medusa's heads do not attend"
        )
    rows = [row for record in records["codec-shape"] for row in record["codecs"]]
    assert [row["codec"] for row in rows] == ["lossless", "int8", "transform:1"]
    for row in rows:
        positive(row, "chunks_gb_per_s", "chunks_decode_gb_per_s")
    for row in rows[1:]:
        positive(row, "encode_gb_per_s", "decode_gb_per_s")
    positive(records["sampling"][0]["figures"], *records["sampling"][0]["figures"])
    for name, shapes in (("decode", ["plain", "5", "4x4x16"]), ("decode-graphs", ["plain", "3"])):
        rounds = records[name][0]["figures"]["rounds"]
        assert list(rounds)[: len(shapes)] == shapes
        for one in rounds.values():
            positive(one, "tokens_per_s", "round_ms")
        assert list(rounds)[-1] == "transformers"
    for line in (
        "MFU",
        "short products",
        "transform:1 on cpu",
        "4x4x16",
        "verify tree_of_60",
        "pytest -m gpu",
    ):
        assert line in done.stdout


def test_wrong_words_are_refused_in_one_line_and_the_usage_names_every_option() -> None:
    for words, said in {
        (): "Give a folder OUT",
        ("OUT", "--part", "serve"): "decode or train, not serve",
        ("--device",): "--device needs a value",
        ("OUT", "--device", "tpu"): "cuda or cpu, not tpu",
        ("OUT", "--fast"): "no option --fast",
        ("OUT", "--limit-s", "1m"): "whole number of seconds",
        (str(ROOT / "tests"), "--device", "cpu"): "is not empty",
    }.items():
        done = run(*words)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
        assert said in done.stderr
    for option in ("OUT", "--part", "--device", "--tiny", "--peak-tflops", "--limit-s"):
        assert option in run("--help").stdout


def test_a_step_that_fails_is_named_and_keeps_no_other_from_running(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$2" in *train_step) echo broken; exit 3;; '
        "*gpu_report) echo table;; esac\n"
    )
    python.chmod(0o755)
    words = [str(SCRIPT), str(tmp_path / "out"), "--device", "cpu", "--tiny"]
    done = subprocess.run(
        words, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True
    )
    assert done.returncode == 1
    names = re.findall(r"^([\w-]+): (?:\d+ s|FAILED \(3\))", done.stdout, re.MULTILINE)
    assert names == [*DECODE, *TRAIN]
    assert "train: FAILED (3)" in done.stdout
    assert "broken" in done.stdout
    assert done.stdout.endswith("table\nFAILED: train\n")


@pytest.mark.parametrize("part", ["decode", "train"])
def test_what_a_part_lacks_is_said_before_its_first_step(tmp_path: Path, part: str) -> None:
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$2" in *preflight) echo "$3 lacks zarr" >&2; exit 1;; '
        "*) echo ran;; esac\n"
    )
    python.chmod(0o755)
    words = [str(SCRIPT), str(tmp_path / "out"), "--device", "cpu", "--part", part]
    done = subprocess.run(
        words, env=os.environ | {"PYTHON": str(python)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, f"{part} lacks zarr\n")
    assert done.stdout == "ran\n", "whether the package is there"


def test_the_preflight_names_what_is_missing_and_what_does_not_run(
    benchmark: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    preflight = benchmark("gpu.preflight")
    monkeypatch.setitem(preflight.STEPS, "decode", ())
    assert preflight.problem("decode") is None
    monkeypatch.setitem(preflight.STEPS, "decode", ("json.no_such_module",))
    assert f"does not run under torch {torch.__version__}" in preflight.problem("decode")
    monkeypatch.setitem(preflight.NEEDS, "decode", {"json": "json", "no_such_module": "its-wheel"})
    assert preflight.problem("decode").startswith("needs its-wheel, ")


def test_wheels_hold_what_is_required_beside_torch_and_transformers(
    benchmark: Callable[[str], ModuleType],
) -> None:
    preflight = benchmark("gpu.preflight")
    decode, both = (
        {line.split("==")[0] for line in preflight.wheels(parts)}
        for parts in (["decode"], ["train"])
    )
    assert {"pydantic", "pydantic-core", "pytest"} <= decode < both
    assert {"zarr", "donfig", "numcodecs", "lightning"} <= both - decode
    assert not both & {"torch", "transformers", "numpy", "safetensors"}


def test_a_step_writes_a_record_that_the_table_reads(
    benchmark: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    sampling, report = benchmark("decoding.sampling"), benchmark("gpu.gpu_report")
    words = ["sampling.py", "--vocabulary", "100", "--repeats", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", words)
    sampling.main()
    (record,) = tmp_path.glob("sampling-*.json")
    positive(json.loads(record.read_text())["figures"], "draw_ms", "multinomial_ms")
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", str(tmp_path)])
    report.main()
    assert len(re.findall(r"^sampling +\w.* [\d.]+$", capsys.readouterr().out, re.MULTILINE)) == 16


@pytest.mark.slow
def test_decoding_needs_no_more_than_its_wheels(benchmark: Callable[[str], ModuleType]) -> None:
    """Packages that only training needs are hidden.

    Of the tests for a device, only the imports run here.
    """
    preflight = benchmark("gpu.preflight")
    hidden = set(preflight.NEEDS["train"]) - set(preflight.NEEDS["decode"]) | {"matplotlib"}
    root = Path(__file__).parents[2]
    code = f"""if True:
        import sys, pytest
        from importlib.machinery import PathFinder
        class Hiding(PathFinder):
            @classmethod
            def find_spec(cls, name, path=None, target=None):
                return None if name.split(".")[0] in {sorted(hidden)!r} else super().find_spec(name, path, target)
        sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
        sys.exit(pytest.main(["-q", "-o", "addopts=", "-p", "pytest_timeout", *sys.argv[1:]]))
    """
    # zarr installs a pytest plugin.
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    for words in (["--collect-only", "tests/gpu/test_decoding.py"], ["tests/moa/nn/test_masks.py"]):
        command = [sys.executable, "-c", code, *words]
        done = subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stdout[-3000:]
