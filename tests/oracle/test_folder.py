"""Tests read every file of the folder; the committed vectors are small and cover all drafters."""

from .vectors import COMMITTED, FOLDER, KINDS, kind_of, set_of


def test_no_file_is_skipped() -> None:
    files = {file for file in FOLDER.iterdir() if file.name != "README.md"}
    unknown = sorted(file.name for file in files if kind_of(file.stem) is None)
    assert not unknown, (
        f"no test reads {', '.join(unknown)} in {FOLDER}; its kinds are {', '.join(KINDS)}"
    )
    assert files, f"{FOLDER} holds no official vectors"
    stems = {file.stem for file in files}
    assert {file.name for file in files} == {
        f"{stem}{end}" for stem in stems for end in (".json", ".safetensors")
    }
    for stem in stems:
        assert f"{set_of(stem)}moa_weights" in stems, f"{stem} has no weights beside it"


def test_the_committed_vectors_are_small_and_cover_every_kind() -> None:
    files = list(COMMITTED.iterdir())
    assert sum(file.stat().st_size for file in files) < 2.1e6
    assert {kind_of(file.stem) for file in files} >= set(KINDS) - {"moa_trained_drafter_weights"}
    assert {file.stem.split("_")[2] for file in files if kind_of(file.stem) == "moa_train_"} == {
        "tli0",
        "tli1",
    }
