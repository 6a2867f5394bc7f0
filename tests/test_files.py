"""Checks of output folders with files of earlier commands or other programs, and of parsed files."""

import errno
import os
from pathlib import Path

import pytest

from moa_data.errors import DrafterError, OutputOccupied
from moa_data.files import parsing, refuse_other_files, refuse_other_inputs
from moa_data.tests.kit.errors import raises_naming


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    refuse_other_files(tmp_path / "missing")
    refuse_other_files(tmp_path)
    (tmp_path / "run.lock").write_text("")
    refuse_other_files(tmp_path, leftovers={"run.lock"})
    with raises_naming(OutputOccupied, tmp_path):
        refuse_other_files(tmp_path)
    (tmp_path / "thesis.tex").write_text("precious")
    for path in (tmp_path, tmp_path / "thesis.tex"):
        with raises_naming(OutputOccupied, path):
            refuse_other_files(path, "a run", {"run.lock"})


def test_other_inputs_are_refused_unless_they_may_change(tmp_path: Path) -> None:
    recorded = {"seed": 0, "steps": 4, "device": "cpu"}
    refuse_other_inputs(tmp_path, recorded, {"seed": 0, "steps": 8, "tree": None}, {"steps"})
    with raises_naming(OutputOccupied, tmp_path, "seed", 0, 7, "tree", None, "'5'"):
        refuse_other_inputs(tmp_path, recorded, {"seed": 7, "steps": 4, "tree": "5"})


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOVERFLOW, errno.EIO, errno.ENOSPC])
def test_a_system_error_without_a_path_names_the_parsed_file(number: int) -> None:
    is_damage = number in (errno.EINVAL, errno.EOVERFLOW)
    for error in (OSError(number, os.strerror(number)), ValueError(f"x (os error {number})")):
        with (
            raises_naming(DrafterError if is_damage else OSError, "cannot read weights.bin"),
            parsing("cannot read weights.bin", DrafterError),
        ):
            raise error


def test_a_system_error_with_a_path_stays_as_it_is() -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "scratch")
    with (
        pytest.raises(OSError, match="scratch") as caught,
        parsing("cannot read weights.bin", DrafterError),
    ):
        raise error
    assert caught.value is error
