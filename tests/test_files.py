"""Checks of output folders that hold files of earlier commands or of other programs."""

from pathlib import Path

from moa_data.errors import OutputOccupied
from moa_data.files import refuse_other_files, refuse_other_inputs
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
