"""Free memory is what the machine and all control groups of the process leave available."""

import mmap
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from moa_data import machine

GIB = 1 << 30


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace /proc and /sys/fs/cgroup by a folder. 20 GiB are available."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 99 kB\nMemAvailable:   {20 * GIB // 1024} kB\n")
    (tmp_path / "cgroup").write_text("")
    files = {"/proc/meminfo": "meminfo", "/proc/self/cgroup": "cgroup"}
    monkeypatch.setattr(machine, "Path", lambda path: tmp_path / files[path])
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "sys")
    return tmp_path


NAMES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    2: ("memory.max", "memory.current", "file"),
}


def write_group(folder: Path, version: int, limit: object, used: int, cached: int = 0) -> None:
    limit_name, used_name, cache = NAMES[version]
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in {
        limit_name: limit,
        used_name: used,
        "memory.stat": f"anon 5\n{cache} {cached}",
    }.items():
        (folder / name).write_text(f"{text}\n")


def test_without_limits_it_is_what_the_kernel_calls_available(proc: Path) -> None:
    assert machine.free_memory() == 20 * GIB
    (proc / "meminfo").unlink()
    assert machine.free_memory() is None


@pytest.mark.parametrize(("version", "line"), [(2, "0::/job/step"), (1, "7:cpu,memory:/job/step")])
def test_the_tightest_limit_counts_and_cached_files_are_free(
    proc: Path, version: int, line: str
) -> None:
    (proc / "cgroup").write_text(f"3:cpuset:/elsewhere\n{line}\n")
    # The group `job` has no limit yet.
    job = proc / "sys" / ("memory" if version == 1 else "") / "job"
    write_group(job / "step", version, "max" if version == 2 else 1 << 62, 3 * GIB)
    assert machine.free_memory() == 20 * GIB
    write_group(job / "step", version, 8 * GIB, 3 * GIB)
    assert machine.free_memory() == 5 * GIB
    write_group(job, version, 4 * GIB, 3 * GIB, GIB)
    assert machine.free_memory() == 2 * GIB


def test_this_machine_has_cores_and_memory() -> None:
    assert machine.usable_cores() >= 1
    assert (machine.free_memory() or 1) > 0


@pytest.mark.parametrize(
    ("environment", "is_first"),
    [
        ({}, True),
        ({"RANK": "0", "LOCAL_RANK": "0"}, True),
        ({"RANK": "8", "LOCAL_RANK": "0"}, False),
        # torchrun on the second machine of a SLURM job
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, True),
        ({"SLURM_PROCID": "8", "SLURM_LOCALID": "0"}, False),
        ({"NODE_RANK": "0", "LOCAL_RANK": "1"}, False),
        # Started by hand, before Lightning has started the processes of the other devices.
        ({"NODE_RANK": "1"}, False),
    ],
)
def test_the_first_process(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_first: bool
) -> None:
    for name in ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert machine.is_first_process() == is_first


def use_huge_pages_for_a_block(are_counted: bool) -> None:
    """Check the bytes of a large block and, if they are counted, its huge pages."""
    status = Path("/proc/self/smaps_rollup")
    block = mmap.mmap(-1, 8 << 20, mmap.MAP_PRIVATE)
    block.write(text := bytes(range(256)) * (8 << 12))

    def huge_kib() -> int:
        return int(status.read_text().partition("AnonHugePages:")[2].split()[0])

    before = huge_kib() if are_counted else 0
    machine.use_huge_pages()
    assert block[:] == text
    assert not are_counted or huge_kib() > before


def test_large_blocks_get_huge_pages_and_keep_their_bytes() -> None:
    enabled = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    has_them = enabled.exists() and "[never]" not in enabled.read_text()
    # Older kernels have none for memory that is in use already.
    is_new = tuple(map(int, platform.release().split(".")[:2])) >= (6, 1)
    # A new process has few large blocks. This one may have gigabytes of them.
    name = use_huge_pages_for_a_block.__name__
    code = f"from moa_data.tests.test_machine import {name}; {name}({has_them and is_new})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if not has_them or not is_new:
        pytest.skip("this kernel has none, or none for what is there already")
